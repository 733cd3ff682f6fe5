"use strict";
(() => {
  const numeric = (text) => {
    const found = /^[-+]?[\d,]*\.?\d+(?:e[-+]?\d+)?/i.exec(text.trim());
    return found ? Number(found[0].replaceAll(",", "")) : NaN;
  };
  const collator = new Intl.Collator("en", { numeric: true });
  // What is missing (null, NaN) comes last, whichever way the column is sorted.
  const compare = (a, b, sign) => {
    const noA = a === null || Number.isNaN(a), noB = b === null || Number.isNaN(b);
    if (noA || noB) return noA - noB;
    return sign * (typeof a === "number" && typeof b === "number" ? a - b : collator.compare(a, b));
  };
  // Turns a table's heads into buttons; sort(column, sign) is called with 1 (ascending) or -1.
  const sortable = (table, sort) => {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = head.textContent;
      head.replaceChildren(button);
      head.setAttribute("aria-sort", "none");
      button.addEventListener("click", () => {
        const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
        heads.forEach((other) => other.setAttribute("aria-sort", "none"));
        head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
        sort(column, sign);
      });
    });
  };

  for (const table of document.querySelectorAll("table.sortable")) {
    const body = table.tBodies[0];
    sortable(table, (column, sign) => {
      const rows = [...body.rows].map((row) => {
        const text = row.cells[column].textContent.trim();
        const number = table.tHead.rows[0].cells[column].classList.contains("number");
        return { row, key: text === "-" ? null : number ? numeric(text) : text };
      });
      rows.sort((a, b) => compare(a.key, b.key, sign));
      body.replaceChildren(...rows.map((each) => each.row));
    });
  }

  const data = document.getElementById("tensor-data");
  if (!data) return;
  const all = JSON.parse(data.textContent);
  const table = document.getElementById("tensor-table");
  const body = table.tBodies[0], status = document.getElementById("tensor-status");
  const filter = document.getElementById("tensor-filter"), lossy = document.getElementById("tensor-lossy");
  const previous = document.getElementById("tensor-previous"), next = document.getElementById("tensor-next");
  const size = Number(table.dataset.pageRows), texts = Number(table.dataset.textColumns);
  const lossyColumn = [...table.tHead.rows[0].cells].findIndex((head) => head.textContent.trim() === "lossy");
  let shown = all, page = 0, order = null;

  const cell = (value, column) => {
    if (value === null) return "-";
    if (typeof value !== "number") return value;
    return Number.isInteger(value) ? value.toLocaleString("en") : String(Number(value.toPrecision(4)));
  };
  const draw = () => {
    const start = page * size, rows = shown.slice(start, start + size);
    body.replaceChildren(...rows.map((values) => {
      const row = document.createElement("tr");
      values.forEach((value, column) => {
        const item = document.createElement(column ? "td" : "th");
        if (!column) item.scope = "row";
        if (column >= texts) item.className = "number";
        item.textContent = cell(value, column);
        row.append(item);
      });
      return row;
    }));
    const of = shown.length === all.length ? "" : ` that match, of ${all.length.toLocaleString("en")}`;
    status.textContent = rows.length
      ? `Tensors ${(start + 1).toLocaleString("en")} to ${(start + rows.length).toLocaleString("en")} of ${shown.length.toLocaleString("en")}${of}.`
      : "No tensor matches.";
    previous.disabled = page === 0;
    next.disabled = start + size >= shown.length;
  };
  const select = () => {
    const wanted = filter.value.trim().toLowerCase();
    shown = all.filter((row) => (!wanted || row[0].toLowerCase().includes(wanted)) && (!lossy.checked || row[lossyColumn] > 0));
    if (order) shown.sort((a, b) => compare(a[order.column], b[order.column], order.sign));
    page = 0;
    draw();
  };
  sortable(table, (column, sign) => { order = { column, sign }; select(); });
  filter.addEventListener("input", select);
  lossy.addEventListener("change", select);
  previous.addEventListener("click", () => { page -= 1; draw(); });
  next.addEventListener("click", () => { page += 1; draw(); });
  const controls = document.getElementById("tensor-controls");
  controls.addEventListener("submit", (event) => event.preventDefault());
  controls.hidden = false;
  draw();
})();
