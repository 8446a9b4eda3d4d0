// All runs of the store in one table, sorted by any column, and a plot of any final value against any setting.

import { ask } from "./dashboard-api.js";
import { CONFIG, FONT, literal } from "./dashboard-charts.js";
import { byId, el, number, show } from "./dashboard-dom.js";
import { colour, ink, theme } from "./dashboard-look.js";
import { change, state } from "./dashboard-state.js";

export const everyRun = true; // it is drawn also where no run is chosen
const MOST = 500; // rows
let plot = null;

export function forget() {
  if (plot) Plotly.purge(plot);
  plot = null;
}

export async function draw(view, s, current) {
  const table = await ask("sweep");
  if (!current()) return;
  const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const rows = table.rows.filter((r) => words.every((w) => `${r.run} ${r.status} ${r.verdict}`.toLowerCase().includes(w)));
  if (!view.querySelector(".sweep-card")) {
    plot = el("div", { className: "plot tall" });
    view.replaceChildren(el("article", { className: "card sweep-card" }), el("article", { className: "card" }, el("div", { className: "sweep-plot" }), plot));
  }
  const [card, below] = view.children;
  show(card, ...tableOf(table, rows, s.runs));
  drawPlot(below, table, rows);
}

/** A cell as a number or a text; null where the run has none. A setting that is a number is sorted as one. */
function value(row, column) {
  if (column in row.cells) return row.cells[column];
  if (column in row.finals) return row.finals[column];
  const text = row.settings[column] ?? row.settings[column.replace(/^settings\./, "")] ?? null;
  return text !== null && text.trim() !== "" && Number.isFinite(Number(text)) ? Number(text) : text;
}

function tableOf({ columns, total }, rows, chosen) {
  const [by, reverse] = (state.sort ?? "run").startsWith("-") ? [state.sort.slice(1), true] : [state.sort ?? "run", false];
  const sorted = [...rows].sort((a, b) => ordered(value(a, by), value(b, by), reverse)).slice(0, MOST);
  const head = (c) => el("th", { scope: "col", className: ["run", "status", "verdict"].includes(c) ? "" : "number", ...(c === by ? { "aria-sort": reverse ? "descending" : "ascending" } : {}) },
    el("button", { type: "button", textContent: c === by ? `${c} ${reverse ? "▾" : "▴"}` : c, title: `Sort by ${c}`, dataset: { key: `sort ${c}` },
      onclick: () => change({ sort: c === by && !reverse ? `-${c}` : c }) }));
  const more = rows.length > MOST ? `The first ${MOST} of ${rows.length}.` : rows.length < total ? `${rows.length} of ${total} runs; others are filtered, or not read yet.` : "";
  return [el("h3", {}, "Runs", el("small", { textContent: `settings that differ, final values, verdicts. ${more}` })),
    el("div", { className: "scroll" }, el("table", { className: "settings sweep" }, el("thead", {}, el("tr", {}, ...columns.map(head))),
      el("tbody", {}, ...sorted.map((r) => line(r, columns, chosen)))))];
}

/** Numbers before words, and gaps last in either order. */
function ordered(a, b, reverse) {
  if (a === null || b === null) return (a === null) - (b === null);
  const kind = (typeof a === "string") - (typeof b === "string");
  const order = kind || (a < b ? -1 : a > b ? 1 : 0);
  return reverse ? -order : order;
}

function line(row, columns, chosen) {
  const on = chosen.includes(row.run);
  const box = el("input", { type: "checkbox", dataset: { key: `row ${row.run}`, on }, title: "Show this run in the other tabs",
    onchange: (e) => change({ runs: e.target.checked ? [...chosen, row.run] : chosen.filter((n) => n !== row.run) }) });
  box.checked = on;
  const [, ...rest] = columns;
  return el("tr", { className: on ? "on" : "", title: row.sentence }, el("th", { scope: "row" }, el("label", {}, box, row.run)), ...rest.map((c) => {
    const v = c === "magnitude" ? row.magnitude : value(row, c);
    const text = v === null ? "" : typeof v === "number" ? number(v) : v;
    return el("td", { textContent: text, className: c === "verdict" ? row.style : c === "status" ? "" : "number" });
  }));
}

// ---------------------------------------------------------------------------------------------------------------- the plot

function drawPlot(card, { values, settings, columns }, rows) {
  const has = (names) => names.filter((n) => rows.some((r) => value(r, n) !== null));
  const [ys, xs] = [has(values), has([...new Set([...settings, ...values])])];
  card.hidden = !ys.length || !xs.length;
  if (card.hidden) return;
  const y = ys.includes(state.value) ? state.value : ys.includes("magnitude") ? "magnitude" : ys[0];
  const x = xs.includes(state.against) ? state.against : xs[0];
  const select = (title, key, names, chosen) => el("label", {}, title, " ", el("select", { "aria-label": title, dataset: { key },
    onchange: (e) => change({ [key]: names[e.target.selectedIndex] }) }, ...names.map((n) => {
    const option = el("option", { textContent: n, dataset: { on: n === chosen } });
    option.selected = n === chosen;
    return option;
  })));
  show(card.firstElementChild, select("Plot", "value", ys, y), select("against", "against", xs, x));
  const points = rows.map((r) => ({ x: value(r, x), y: value(r, y), run: r.run })).filter((p) => p.x !== null && typeof p.y === "number");
  const words = points.some((p) => typeof p.x === "string");
  const at = points.map((p) => (words ? String(p.x) : p.x));
  const wide = !words && at.length && Math.min(...at) > 0 && Math.max(...at) > 20 * Math.min(...at);
  const c = ink(theme());
  const axis = { gridcolor: c.grid, linecolor: c.line, tickfont: { size: 10.5, color: c.faint }, zeroline: false, automargin: true };
  Plotly.react(plot, [{ type: "scatter", mode: "markers", x: at.map((v) => (words ? literal(v) : v)), y: points.map((p) => p.y), text: points.map((p) => literal(p.run)),
    hovertemplate: "%{text}<br>%{x}: %{y:.4g}<extra></extra>", marker: { size: 8, color: colour(0, 1), opacity: 0.75 } }],
  { autosize: true, margin: { l: 56, r: 12, t: 8, b: 40 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { family: FONT, size: 11, color: c.text },
    hovermode: "closest", xaxis: { ...axis, type: words ? "category" : wide ? "log" : "linear", ...(wide ? { dtick: 1 } : {}), title: { text: literal(x), standoff: 4 } },
    yaxis: { ...axis, title: { text: literal(y), standoff: 4 } } }, CONFIG);
}
