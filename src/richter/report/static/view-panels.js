// Any view that answers with panels: curves side by side, then tables and words. A view that was added in Python needs no script.

import { ask } from "./dashboard-api.js";
import { drawPanels, forgetPanels } from "./dashboard-charts.js";
import { el, number, show } from "./dashboard-dom.js";

export const draw = (view, s, current) => drawAnswer(view, s, current);

/** Ask the view, perhaps for more than the runs, and draw what it answers. */
export async function drawAnswer(view, { name, runs }, current, more = {}) {
  const { panels } = await ask(name, { run: runs, ...more });
  if (!current()) return;
  if (!view.querySelector(".grid")) view.replaceChildren(el("div", { className: "grid" }), el("div", { className: "cards" }));
  const [grid, cards] = view.children;
  drawPanels(grid, panels.filter((p) => p.kind === "curves").map((p, i) => ({ ...p, ...drawn(p), key: `${name} ${i}`, hint: p.sentence })));
  show(cards, ...panels.filter((p) => p.kind !== "curves").map(card));
}

export const forget = forgetPanels;

/** What the panels of curves need to know about each line. */
function drawn({ curves }) {
  const lines = curves.map((c) => ({ ...c, run: c.label, measure: c.label, layer: null, note: "", mark: "exact" }));
  return { curves: lines, runs: curves.map((c) => c.label), layers: [], legend: curves.length > 1 };
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
