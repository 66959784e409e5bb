"use strict";
const unfold = document.getElementById("unfold");
unfold.addEventListener("click", () => {
  const all = [...document.querySelectorAll("details")];
  const open = all.some((d) => !d.open);
  for (const d of all) d.open = open;
  unfold.textContent = open ? "fold all" : "open all";
});

for (const button of document.querySelectorAll("nav button[data-view]")) {
  button.addEventListener("click", () => {
    document.body.className = "view-" + button.dataset.view;
    for (const other of document.querySelectorAll("nav button[data-view]"))
      other.setAttribute("aria-pressed", String(other === button));
  });
}

function shown(cell) {
  const view = document.body.className.slice(5);
  const span = cell.querySelector("." + (view === "both" ? "ours" : view)) || cell;
  const number = span.textContent.replace(/−/g, "-").match(/-?\d+(\.\d+)?/);
  return number ? Number(number[0]) : -Infinity;
}

function compare(a, b) {
  const number = (text) => /^[+\-−]?\d/.test(text) ? Number(text.replace("−", "-").replace(/,/g, "").match(/[+-]?\d+(\.\d+)?(e-?\d+)?/)[0]) : NaN;
  const [x, y] = [number(a), number(b)];
  return Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b, undefined, { numeric: true }) : x - y;
}

for (const table of document.querySelectorAll("table.paper, table.sortable")) {
  const heads = [...table.tHead.rows[table.tHead.rows.length - 1].cells];
  heads.forEach((head, column) => {
    const text = table.classList.contains("sortable") || column === 0;
    const sort = () => {
      const before = head.getAttribute("aria-sort");
      const first = text && !head.classList.contains("number") ? "ascending" : "descending";
      const order = before === null ? first : before === "ascending" ? "descending" : "ascending";
      heads.forEach((h) => h.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", order);
      for (const body of table.tBodies) {
        const rows = [...body.rows].filter((r) => !r.classList.contains("block"));
        const key = (r) => r.cells[column];
        rows.sort((a, b) => text ? compare(key(a).textContent, key(b).textContent) : shown(key(a)) - shown(key(b)));
        if (order === "descending") rows.reverse();
        for (const row of rows) body.append(row);
      }
    };
    head.tabIndex = 0;
    head.addEventListener("click", sort);
    head.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(); });
  });
}

for (const part of document.querySelectorAll(".filtered")) {
  const rows = [...part.querySelectorAll("tbody tr")];
  part.querySelector("input").addEventListener("input", (event) => {
    const words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of rows) row.hidden = !words.every((w) => row.textContent.toLowerCase().includes(w));
    for (const fold of part.querySelectorAll("details")) {
      const found = [...fold.querySelectorAll("tbody tr")].some((r) => !r.hidden);
      fold.hidden = !found;
      fold.open = words.length > 0 && found;
    }
    part.querySelector(".count").textContent = words.length ? `${rows.filter((r) => !r.hidden).length} of ${rows.length}` : "";
  });
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

function places(sample) {
  const found = new Set();
  const starts = [];
  let text = "";
  for (const token of sample.tokens) { starts.push(text.length); text += token; }
  for (const answer of sample.answers) {
    if (answer.trim().length < 2) continue;
    for (let at = text.indexOf(answer); at >= 0; at = text.indexOf(answer, at + 1))
      starts.forEach((start, i) => {
        if (start < at + answer.length && start + sample.tokens[i].length > at) found.add(i);
      });
  }
  return found;
}

function paint(sample, method) {
  prompt.replaceChildren();
  const found = places(sample);
  sample.tokens.forEach((token, i) => {
    const span = make("span", token, prompt);
    const share = Number(method.kept[i] || 0) / 9;
    if (share) span.style.background = `rgba(var(--keep), ${0.15 + 0.5 * share})`;
    if (found.has(i)) span.className = "found";
    span.title = `token ${i}: kept by ${Math.round(100 * share)} % of layers and heads`;
  });
  const first = prompt.querySelector(".found");
  prompt.scrollTop = first ? Math.max(0, first.offsetTop - prompt.offsetTop - prompt.clientHeight / 2) : 0;
  for (const row of answers.rows)
    row.querySelector("button").setAttribute("aria-pressed", String(row.dataset.label === method.label));
}

function choose() {
  const sample = samples[chooser.selectedIndex];
  document.getElementById("reference").textContent = sample.answers.join(" | ") + (sample.question ? ` (asked later: ${sample.question})` : "");
  document.getElementById("metric").textContent = sample.metric;
  answers.replaceChildren();
  for (const method of sample.methods) {
    const row = make("tr", "", answers);
    row.dataset.label = method.label;
    const name = make("th", "", row);
    const button = make("button", method.label, name);
    button.style.borderLeft = `5px solid ${method.color}`;
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
