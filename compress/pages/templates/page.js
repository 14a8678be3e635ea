for (const button of document.querySelectorAll("th button")) button.addEventListener("click", () => {
  const head = button.closest("th"), body = head.closest("table").tBodies[0], at = head.cellIndex;
  const up = head.getAttribute("aria-sort") !== "ascending";
  for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const key = row => row.cells[at].dataset.value ?? row.cells[at].textContent;
  const by = (a, b) => { const x = key(a), y = key(b), n = x - y; return isNaN(n) ? x.localeCompare(y) : n; };
  body.append(...[...body.rows].sort((a, b) => up ? by(a, b) : by(b, a)));
});
