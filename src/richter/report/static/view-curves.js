// A panel of curves for each chosen measure and scalar, below the verdict in a line.

import { address, ask } from "./dashboard-api.js";
import { drawPanels, forgetPanels, resetZoom } from "./dashboard-charts.js";
import { el, show } from "./dashboard-dom.js";
import { change, state } from "./dashboard-state.js";
import { loadVerdicts, verdictLines } from "./view-verdict.js";

export const choices = true; // measures, layers and scalars are chosen at the side
export const forget = forgetPanels;

const POINTS = 6000; // of all curves of a panel together,
const LEAST = 30; // and of one of very many
let kept = new Map(); // run -> {mark, wanted, curves}

export function tools(s) {
  const toggle = (key, text, title) => el("button", { type: "button", textContent: text, title, "aria-pressed": String(Boolean(state[key])), dataset: { key },
    onclick: () => change({ [key]: !state[key] }) });
  return [toggle("logx", "log steps", "Logarithmic steps"), toggle("pan", "drag to pan", "Drag moves the curves instead of zooming"),
    el("button", { type: "button", textContent: "reset zoom", title: "Show everything (double-click does it too)", dataset: { key: "reset" }, onclick: resetZoom }),
    el("a", { href: address("curves.csv", query(s, s.runs)), textContent: "CSV", title: "All points of all panels as a table", download: "richter-curves.csv", dataset: { key: "csv" } })];
}

const query = (s, runs, measures = s.chosen.measures, scalars = s.chosen.scalars) => (
  { run: runs, measure: measures, layer: s.chosen.layers, scalar: scalars });

export async function draw(view, s, current) {
  const [curves, verdicts] = await Promise.all([loadCurves(s), loadVerdicts(s.runs)]);
  if (!current()) return;
  if (!view.querySelector(".grid")) view.replaceChildren(el("div", { className: "verdicts" }), el("div", { className: "grid" }));
  const [lines, grid] = view.children;
  show(lines, ...verdictLines(verdicts));
  const shared = { runs: s.runs, layers: s.chosen.layers, diverged: s.diverged };
  const scalar = (n) => ({ ...shared, key: `scalar ${n}`, title: n, hint: "", table: query(s, s.runs, [], [n]), words: stages(s, n, curves),
    curves: curves.filter((c) => c.measure === n && c.layer === null) });
  drawPanels(grid, [
    ...s.chosen.scalars.filter(isLoss).map(scalar),
    ...s.chosen.measures.map((m) => ({ ...shared, key: m, title: s.cards[m].title, hint: s.cards[m].sentence, table: query(s, s.runs, [m], []),
      curves: curves.filter((c) => c.measure === m && c.layer !== null) })),
    ...s.chosen.scalars.filter((n) => !isLoss(n)).map(scalar),
  ].filter((p) => p.curves.length));
}

const isLoss = (name) => /loss/i.test(name);

/** What is said of the stages of a loss. */
const stages = (s, name, curves) => curves.filter((c) => c.measure === name && c.layer === null && c.stages)
  .map((c) => `${s.runs.length > 1 ? `${c.run}: ` : ""}${c.stages.words}.`).join(" ");

/** In one question those of the runs that have something new, or of which other curves were chosen. */
async function loadCurves(s) {
  const points = Math.max(LEAST, Math.min(600, Math.floor(POINTS / Math.max(1, s.runs.length * s.chosen.layers.length))));
  const wanted = JSON.stringify([s.chosen, points]);
  const stale = s.runs.filter((r) => kept.get(r)?.mark !== s.marks.get(r) || kept.get(r)?.wanted !== wanted);
  if (stale.length) {
    const { curves } = await ask("curves", { ...query(s, stale), points });
    for (const r of stale) kept.set(r, { mark: s.marks.get(r), wanted, curves: curves.filter((c) => c.run === r) });
  }
  kept = new Map(s.runs.map((r) => [r, kept.get(r)]));
  return s.runs.flatMap((r) => kept.get(r).curves);
}
