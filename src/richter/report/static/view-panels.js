// Any view that answers with panels: matrices of numbers, curves side by side, then pictures, tables and words. A view that was
// added in Python needs no script.

import { address, ask } from "./dashboard-api.js";
import { drawPanels, forgetPanels } from "./dashboard-charts.js";
import { el, layerName, number, show } from "./dashboard-dom.js";
import { shade } from "./dashboard-look.js";

const LEGEND = 12; // curves up to which a panel has a legend

export const draw = (view, s, current) => drawAnswer(view, s, current);

/** Ask the view, perhaps for more than the runs, and draw what it answers. */
export async function drawAnswer(view, { name, runs }, current, more = {}) {
  const { panels } = await ask(name, { run: runs, ...more });
  if (!current()) return;
  if (!view.querySelector(".grid")) view.replaceChildren(...["beside", "grid", "cards"].map((className) => el("div", { className })));
  const [beside, grid, cards] = view.children;
  show(beside, ...panels.filter((p) => p.kind === "cells").map(card));
  drawPanels(grid, panels.filter((p) => p.kind === "curves").map((p, i) => ({ ...p, ...drawn(p), key: `${name} ${i}`, hint: p.sentence })));
  show(cards, ...panels.filter((p) => !["curves", "cells"].includes(p.kind)).map(card));
}

export const forget = forgetPanels;

/** What the panels of curves need to know about each line. */
function drawn({ curves }) {
  const lines = curves.map((c) => ({ ...c, run: c.label, measure: c.label, layer: null, note: "", mark: "exact" }));
  return { curves: lines, runs: curves.map((c) => c.label), layers: [], legend: curves.length > 1 && curves.length <= LEGEND };
}

const CONTENT = { table, cells, gallery };
const card = (panel) => el("article", { className: "card" }, el("h3", { textContent: panel.title }),
  panel.sentence ? el("p", { className: "faint", textContent: panel.sentence }) : null, CONTENT[panel.kind]?.(panel) ?? null);

/** A matrix of numbers, each in a cell of its colour. */
function cells({ rows, columns, values, axes, low, high }) {
  const at = (v) => Math.min(1, Math.max(0, (v - low) / (high - low)));
  const cell = (v, i, j) => el("td", { textContent: v === null ? "–" : v.toFixed(2), title: `${rows[i]}, ${columns[j]}: ${number(v)}`,
    style: v === null ? {} : { background: shade(at(v)), color: at(v) > 0.5 ? "#111111" : "#ffffff" } });
  return el("div", { className: "scroll" }, el("table", { className: "cells" },
    el("caption", { className: "faint", textContent: axes[1] ? `rows: ${axes[0]}; columns: ${axes[1]}` : "" }),
    el("thead", {}, el("tr", {}, el("td"), ...columns.map((c) => el("th", { scope: "col", textContent: layerName(c) })))),
    el("tbody", {}, ...values.map((row, i) => el("tr", {}, el("th", { scope: "row", textContent: layerName(rows[i]) }), ...row.map((v, j) => cell(v, i, j)))))));
}

/** Pictures, shown as images, in which nothing runs. */
function gallery({ pictures }) {
  return el("div", { className: "gallery" }, ...pictures.map((p) => el("figure", {}, el("figcaption", { className: "faint", textContent: p.label }),
    el("img", { loading: "lazy", alt: p.label, src: address(p.path, p.query) }))));
}

function table({ columns, rows }) {
  const cell = (v) => (typeof v === "string" ? v : number(v));
  return el("div", { className: "scroll" }, el("table", { className: "settings" },
    el("thead", {}, el("tr", {}, ...columns.map((c) => el("th", { scope: "col", textContent: c })))),
    el("tbody", {}, ...rows.map(([first, ...rest]) => el("tr", {}, el("th", { scope: "row", textContent: cell(first) }),
      ...rest.map((v) => el("td", { textContent: cell(v) })))))));
}
