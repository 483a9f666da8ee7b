// Tables: a click on a head sorts, a field filters, a click on a transfer shows it in the timeline.
"use strict";
(() => {
  const value = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.v === undefined ? cell.textContent.trim().toLowerCase() : Number(cell.dataset.v);
  };

  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      if (!head.textContent) return;
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const rows = [...table.tBodies[0].rows];
        const now = head.getAttribute("aria-sort");
        const numbers = rows.length > 0 && typeof value(rows[0], column) === "number";
        const down = now ? now === "ascending" : numbers; // numbers: the largest first
        for (const other of heads) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const order = (a, b) => (a < b ? -1 : a > b ? 1 : 0) * (down ? -1 : 1);
        rows.sort((a, b) => order(value(a, column), value(b, column)));
        table.tBodies[0].append(...rows);
      });
    });
  }

  for (const row of document.querySelectorAll("tr[data-row]")) {
    row.tabIndex = 0;
    const show = () => document.dispatchEvent(new CustomEvent("show-transfer", { detail: Number(row.dataset.row) }));
    row.addEventListener("click", () => String(getSelection()) || show());
    row.addEventListener("keydown", (event) => event.key === "Enter" && show());
  }

  const filter = document.getElementById("filter");
  filter.closest("p").hidden = !document.getElementById("transfers");
  filter.addEventListener("input", () => {
    const words = filter.value.toLowerCase().split(/\s+/);
    for (const row of document.getElementById("transfers").tBodies[0].rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
  });
})();
