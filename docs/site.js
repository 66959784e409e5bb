// A click on a head sorts its table: by number where all cells begin with one, otherwise by text.
function sortBy(table, column, down) {
  const rows = [...table.tBodies[0].rows];
  const text = (row) => (row.cells[column]?.textContent ?? "").trim();
  const number = (row) => {
    const fraction = text(row).match(/^(\d+)\/(\d+)$/);
    return fraction ? fraction[1] / fraction[2] : parseFloat(text(row).replace("−", "-"));
  };
  const numeric = rows.every((row) => text(row) === "" || text(row) === "—" || !Number.isNaN(number(row)));
  // empty cells stand last in both directions
  const empty = (row) => (text(row) === "" || text(row) === "—" ? 1 : 0);
  const order = (a, b) => (numeric ? number(a) - number(b) : text(a).localeCompare(text(b))) * (down ? -1 : 1);
  rows.sort((a, b) => empty(a) - empty(b) || order(a, b) || 0);
  rows.forEach((row) => table.tBodies[0].append(row));
}
document.querySelectorAll("article table:not([class])").forEach((table) => {
  table.querySelectorAll("th").forEach((head, column) => {
    head.tabIndex = 0;
    const sort = () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      table.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      sortBy(table, column, down);
    };
    head.addEventListener("click", sort);
    head.addEventListener("keydown", (event) => event.key === "Enter" && sort());
  });
});
// A table of many columns is set smaller (site.css).
document.querySelectorAll("article table:not([class])").forEach((table) => {
  if (table.querySelectorAll("thead th").length > 9) table.dataset.wide = "";
});
// A cell with a sentence is not squeezed by many columns on a narrow screen (site.css).
document.querySelectorAll("article table:not([class])").forEach((table) => {
  if (table.querySelectorAll("thead th").length < 5) return;
  table.querySelectorAll("td").forEach((cell) => {
    if (cell.textContent.length > 60) cell.dataset.long = "";
  });
});
// A number keeps its interval and unit on its line (site.css).
document.querySelectorAll("article table:not([class]) td").forEach((cell) => {
  if (/^[−-]?[\d.,]+\S*( \[[^\]]*\]| %)?$/.test(cell.textContent.trim())) cell.dataset.number = "";
});
// A long table gets a field that hides the rows without its words.
document.querySelectorAll("article table:not([class])").forEach((table) => {
  const rows = [...table.tBodies[0].rows];
  if (rows.length < 20) return;
  const field = document.createElement("input");
  Object.assign(field, { type: "search", placeholder: "Rows with these words", className: "filter" });
  field.setAttribute("aria-label", field.placeholder);
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    rows.forEach((row) => (row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word))));
  });
  table.before(field);
});
