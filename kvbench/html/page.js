"use strict";
for (const button of document.querySelectorAll("nav button")) {
  button.addEventListener("click", () => {
    document.body.className = "view-" + button.dataset.view;
    for (const other of document.querySelectorAll("nav button"))
      other.setAttribute("aria-pressed", String(other === button));
  });
}

function shown(cell) {
  const view = document.body.className.slice(5);
  const span = cell.querySelector("." + (view === "both" ? "ours" : view)) || cell;
  const number = span.textContent.replace(/−/g, "-").match(/-?\d+(\.\d+)?/);
  return number ? Number(number[0]) : -Infinity;
}

for (const table of document.querySelectorAll("table.paper, table.sortable")) {
  const heads = [...table.tHead.rows[table.tHead.rows.length - 1].cells];
  heads.forEach((head, column) => head.addEventListener("click", () => {
    const up = head.dataset.order === "down";
    heads.forEach((h) => delete h.dataset.order);
    head.dataset.order = up ? "up" : "down";
    for (const body of table.tBodies) {
      const rows = [...body.rows].filter((r) => !r.classList.contains("block"));
      const key = (r) => r.cells[column];
      const text = table.classList.contains("sortable") || column === 0;
      rows.sort((a, b) => text
        ? key(a).textContent.localeCompare(key(b).textContent, undefined, { numeric: true })
        : shown(key(a)) - shown(key(b)));
      if (!up) rows.reverse();
      for (const row of rows) body.append(row);
    }
  }));
}

const store = document.getElementById("samples-data");
const samples = store ? JSON.parse(store.textContent) : [];
const chooser = document.getElementById("sample");
const prompt = document.getElementById("prompt");
const answers = document.getElementById("answers");

function make(tag, text, parent) {
  const element = document.createElement(tag);
  element.textContent = text;
  parent.append(element);
  return element;
}

function paint(sample, method) {
  prompt.replaceChildren();
  sample.tokens.forEach((token, i) => {
    const span = make("span", token, prompt);
    const share = Number(method.kept[i] || 0) / 9;
    if (share) span.style.background = `rgba(var(--keep), ${0.12 + 0.5 * share})`;
    span.title = `token ${i}: kept by ${Math.round(100 * share)} % of layers and heads`;
  });
  for (const row of answers.rows) row.classList.toggle("chosen", row.dataset.label === method.label);
}

function choose() {
  const sample = samples[chooser.selectedIndex];
  document.getElementById("reference").textContent = sample.answers.join(" | ") + (sample.question ? ` (asked later: ${sample.question})` : "");
  answers.replaceChildren();
  for (const method of sample.methods) {
    const row = make("tr", "", answers);
    row.dataset.label = method.label;
    const name = make("th", "", row);
    const button = make("button", method.label, name);
    button.addEventListener("click", () => paint(sample, method));
    make("td", method.score === null ? "—" : (100 * method.score).toFixed(0), row);
    make("td", method.prediction, row).className = "text";
  }
  const best = [...sample.methods.slice(1)].sort((a, b) => (b.score || 0) - (a.score || 0))[0];
  paint(sample, best || sample.methods[0]);
}

if (chooser) {
  for (const sample of samples) make("option", `${sample.task}, ${sample.id}`, chooser);
  chooser.addEventListener("change", choose);
  if (samples.length) choose();
}
