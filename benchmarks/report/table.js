"use strict";

/* The table: seeds that fold away, and headers that sort. */

function foldSeeds(table) {
  for (const button of table.querySelectorAll("button.seeds")) {
    const body = button.closest("tbody");
    const toggle = () => {
      const closed = body.classList.toggle("closed");
      button.setAttribute("aria-expanded", String(!closed));
    };
    button.addEventListener("click", toggle);
    toggle(); // without JavaScript, and on paper, they are all to be seen
  }
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...table.querySelectorAll(".closed")];
    opened.forEach((body) => body.classList.remove("closed"));
  });
  addEventListener("afterprint", () => opened.forEach((body) => body.classList.add("closed")));
}

function sortByHeaders(table) {
  const original = [...table.tBodies];
  const headers = [...table.tHead.rows[0].cells];
  const value = (body, column) => body.rows[0].cells[column].dataset.value;
  headers.forEach((header, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...header.childNodes);
    header.append(button);
    const isText = header.classList.contains("text");
    button.addEventListener("click", () => {
      const next = { ascending: "descending", descending: null }[header.getAttribute("aria-sort")];
      const direction = next === undefined ? "ascending" : next;
      headers.forEach((each) => each.removeAttribute("aria-sort"));
      let bodies = original;
      if (direction) {
        header.setAttribute("aria-sort", direction);
        const sign = direction === "ascending" ? 1 : -1;
        bodies = [...original].sort((one, other) => {
          const [a, b] = [value(one, column), value(other, column)];
          // What has no value comes last, whichever way the others go.
          if (a === undefined || b === undefined) return (a === undefined) - (b === undefined);
          return sign * (isText ? a.localeCompare(b) : a - b);
        });
      }
      table.append(...bodies);
    });
  });
}

for (const table of document.querySelectorAll("main table")) {
  foldSeeds(table);
  sortByHeaders(table);
}
