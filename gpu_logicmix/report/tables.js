"use strict";
// Tables of categories: a click on a heading sorts, a search box keeps the rows whose name contains what is typed.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
  const key = (row, at) => {
    const cell = row.cells[at], number = parseFloat(cell.dataset.value);
    return cell.dataset.value === undefined ? cell.textContent : isNaN(number) ? -Infinity : number;
  };
  heads.forEach((head, at) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") === (at ? "descending" : "ascending");
      const sign = (at === 0) !== up ? 1 : -1;
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
      const rows = [...body.rows].map((row) => [key(row, at), row]);
      rows.sort(([a], [b]) => sign * (typeof a === "string" ? a.localeCompare(b) : a < b ? -1 : a > b ? 1 : 0));
      body.append(...rows.map(([, row]) => row));
    });
  });
  const box = table.closest(".listing").querySelector("input");
  box.hidden = false;
  box.addEventListener("input", () => {
    const wanted = box.value.toLowerCase();
    for (const row of body.rows) row.hidden = !row.cells[0].textContent.toLowerCase().includes(wanted);
  });
}
