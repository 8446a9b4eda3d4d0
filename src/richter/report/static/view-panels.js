// Any view that answers with panels: curves, tables, words. A view that was added in Python needs no script of its own.

import { ask } from "./dashboard-api.js";
import { drawPanels, forgetPanels } from "./dashboard-charts.js";
import { el, number, show } from "./dashboard-dom.js";

export async function draw(view, { name, runs }, current) {
  const { panels } = await ask(name, { run: runs });
  if (!current()) return;
  if (!view.querySelector(".grid")) view.replaceChildren(el("div"), el("div", { className: "grid" }));
  const [cards, grid] = view.children;
  show(cards, ...panels.filter((p) => p.kind !== "curves").map(card));
  drawPanels(grid, panels.filter((p) => p.kind === "curves").map((p, i) => ({ ...p, ...drawn(p), key: `${name} ${i}`, hint: p.sentence })));
}

export const forget = forgetPanels;

/** What the panels of curves need to know about each line. */
function drawn({ curves }) {
  const lines = curves.map((c) => ({ ...c, run: c.label, measure: c.label, layer: null, note: "", mark: "exact" }));
  return { curves: lines, runs: curves.map((c) => c.label), layers: [] };
}

const card = (panel) => el("article", { className: "card" }, el("h3", { textContent: panel.title }),
  panel.sentence ? el("p", { className: "faint", textContent: panel.sentence }) : null, panel.kind === "table" ? table(panel) : null);

function table({ columns, rows }) {
  const cell = (v) => (typeof v === "string" ? v : number(v));
  return el("div", { className: "scroll" }, el("table", { className: "settings" },
    el("thead", {}, el("tr", {}, ...columns.map((c) => el("th", { scope: "col", textContent: c })))),
    el("tbody", {}, ...rows.map(([first, ...rest]) => el("tr", {}, el("th", { scope: "row", textContent: cell(first) }),
      ...rest.map((v) => el("td", { textContent: cell(v) })))))));
}
