// The page: asks for the list of runs again and again, loads what the view needs, and draws it.

import { Refused, address, ask } from "./dashboard-api.js";
import { drawPanels, forgetPanels, resetZoom } from "./dashboard-charts.js";
import { byId, el, layerName, show } from "./dashboard-dom.js";
import { looks, onTheme, swatch } from "./dashboard-look.js";
import { drawMatrices, forgetMatrices } from "./dashboard-matrix.js";
import { drawAges, drawChoice, drawRuns, isChosen } from "./dashboard-side.js";
import { VIEWS, change, onChange, state } from "./dashboard-state.js";
import { emptyStore, message, settingsView, verdictLines, verdictView } from "./dashboard-views.js";

const USUAL = ["nfc", "cnfc", "c_uc_ratio", "weight_change", "tangent_cka"]; // measures shown until somebody chooses
const POINTS = 6000; // of all curves of a panel together
const POLL = { live: 1500, idle: 3000, most: 60000 }; // milliseconds

let list = { store: "", now: 0, runs: [] };
let skew = 0; // this clock minus the server's, in seconds
let kept = new Map(); // run -> {mark, wanted, curves}

// ------------------------------------------------------------------------------------------------------------- the clock

let timer = 0;
let wait = POLL.live;

async function poll() {
  clearTimeout(timer);
  try {
    const found = await ask("runs");
    if (found !== list) {
      list = found;
      skew = Date.now() / 1000 - found.now;
      await draw();
    }
    const running = list.runs.filter((r) => r.status === "running").length;
    live(running ? `live, ${running} running` : "live, nothing running", running ? "running" : "idle");
    drawAges(list.runs, Date.now() / 1000 - skew);
    wait = document.hidden ? Math.min(2 * wait, POLL.most) : running ? POLL.live : POLL.idle;
  } catch (why) {
    live(why instanceof Refused ? why.message : "connection lost, trying again", "lost");
    wait = Math.min(2 * wait, POLL.most / 4);
  }
  timer = setTimeout(poll, wait);
}

function live(text, kind) {
  const box = byId("live");
  if (box.textContent !== text) box.textContent = text;
  box.className = kind;
}

// ----------------------------------------------------------------------------------------------------------- what to show

/** The runs to show: those chosen, or the one that is running, or else the latest. */
function chosenRuns() {
  const readable = list.runs.filter((r) => r.status !== "unreadable");
  if (state.runs !== null) return state.runs.filter((n) => readable.some((r) => r.name === n));
  const order = [...readable].sort((a, b) => (b.status === "running") - (a.status === "running") || b.updated - a.updated);
  return order.slice(0, 1).map((r) => r.name);
}

const union = (lists) => [...new Set(lists.flat())];

/** Everything the side and the views need to know about the chosen runs. */
function selection(runs, details) {
  const measures = union(details.map((d) => d.measures));
  const layers = union(details.map((d) => d.layers)).sort((a, b) => (a === "*") - (b === "*"));
  const scalars = union(details.map((d) => d.scalars));
  const usual = measures.filter((m) => USUAL.includes(m));
  return {
    runs, details, measures, layers, scalars, titles: Object.assign({}, ...details.map((d) => d.titles)),
    chosen: {
      measures: isChosen("measures", measures, usual.length ? usual : measures.slice(0, 5)),
      layers: isChosen("layers", layers, layers), scalars: isChosen("scalars", scalars, scalars.slice(0, 4)),
    },
  };
}

let turn = 0;

async function draw() {
  const mine = ++turn;
  const runs = chosenRuns();
  try {
    const details = await Promise.all(runs.map((run) => ask("run", { run })));
    if (mine !== turn) return;
    const s = selection(runs, details);
    drawSide(s);
    drawBar(s);
    await drawView(s, () => mine === turn);
    notice("");
  } catch (why) {
    if (mine === turn) notice(why instanceof Refused ? why.message : `This could not be shown: ${why.message}`);
    if (!(why instanceof Refused)) throw why;
  }
}

function notice(text) {
  byId("notice").textContent = text;
  byId("notice").hidden = !text;
}

// --------------------------------------------------------------------------------------------------------------- drawing

function drawSide(s) {
  const look = looks(s.runs, s.layers);
  byId("store").textContent = byId("store").title = list.store;
  drawRuns(list.runs, s.runs, look);
  drawAges(list.runs, Date.now() / 1000 - skew);
  const curves = state.view === "curves";
  drawChoice("measures", "measures", "Measures", curves ? s.measures : [], s.chosen.measures, (m) => s.titles[m] ?? m);
  drawChoice("layers", "layers", "Layers", curves ? s.layers : [], s.chosen.layers, layerName, (k) => swatch(layerLook(s, k)));
  drawChoice("scalars", "scalars", "Scalars", curves ? s.scalars : [], s.chosen.scalars, (n) => n);
}

/** With several runs colours are theirs, and a layer is known by its dashes. */
function layerLook(s, layer) {
  const look = looks(s.runs, s.chosen.layers)(s.runs[0], layer);
  return s.runs.length > 1 ? { ...look, color: "currentColor" } : look;
}

function drawBar(s) {
  show(byId("views"), ...Object.entries(VIEWS).map(([key, title]) => el("button", { type: "button", textContent: title, dataset: { key, view: key },
    "aria-current": state.view === key ? "page" : "false", onclick: () => change({ view: key }) })));
  const curves = state.view === "curves" && s.runs.length;
  const toggle = (key, text, title) => el("button", { type: "button", textContent: text, title, "aria-pressed": String(Boolean(state[key])), dataset: { key },
    onclick: () => change({ [key]: !state[key] }) });
  show(byId("tools"),
    ...(curves ? [toggle("logx", "log steps", "Logarithmic steps"), toggle("pan", "drag to pan", "Drag moves the curves instead of zooming"),
      el("button", { type: "button", textContent: "reset zoom", title: "Show everything (double-click does it too)", dataset: { key: "reset" }, onclick: resetZoom }),
      el("a", { href: address("curves.csv", query(s, s.runs)), textContent: "CSV", title: "All points of all panels as a table", download: "richter-curves.csv", dataset: { key: "csv" } })] : []),
    el("button", { type: "button", textContent: "copy link", title: "The address of this view", dataset: { key: "link" }, onclick: copyLink }));
}

async function copyLink(event) {
  const button = event.currentTarget;
  await navigator.clipboard?.writeText(location.href).then(() => { button.textContent = "copied"; }, () => { button.textContent = "see address bar"; });
  setTimeout(() => { button.textContent = "copy link"; }, 1500);
}

let shownView = null;

async function drawView(s, current) {
  const view = byId("view");
  const key = !list.runs.length ? "none" : !s.runs.length ? "unchosen" : state.view;
  if (key !== shownView) {
    forgetPanels();
    forgetMatrices();
    view.replaceChildren();
    byId("tip").hidden = true;
    shownView = key;
  }
  if (key === "none") show(view, emptyStore(list.store));
  else if (key === "unchosen") show(view, message("Choose a run on the left."));
  else await { curves: drawCurves, matrices: drawMatrixView, verdict: drawVerdict, settings: drawSettings }[key](view, s, current);
}

const query = (s, runs, measures = s.chosen.measures, scalars = s.chosen.scalars) => (
  { run: runs, measure: measures, layer: s.chosen.layers, scalar: scalars });

async function drawCurves(view, s, current) {
  const [curves, verdicts] = await Promise.all([loadCurves(s), loadVerdicts(s.runs)]);
  if (!current()) return;
  if (!view.querySelector(".grid")) view.replaceChildren(el("div", { className: "verdicts" }), el("div", { className: "grid" }));
  const [lines, grid] = view.children;
  show(lines, ...verdictLines(verdicts));
  const panels = [
    ...s.chosen.measures.map((m) => ({ key: m, title: s.titles[m] ?? m, query: query(s, s.runs, [m], []), curves: curves.filter((c) => c.measure === m && c.layer !== null) })),
    ...s.chosen.scalars.map((n) => ({ key: `scalar ${n}`, title: n, query: query(s, s.runs, [], [n]), curves: curves.filter((c) => c.measure === n && c.layer === null) })),
  ].filter((p) => p.curves.length);
  drawPanels(grid, panels, s.runs, s.chosen.layers);
}

/** In one question those of the runs that have something new, or of which other curves were chosen. */
async function loadCurves(s) {
  const marks = new Map(list.runs.map((r) => [r.name, r.mark]));
  const points = Math.max(60, Math.min(600, Math.floor(POINTS / Math.max(1, s.runs.length * s.chosen.layers.length))));
  const wanted = JSON.stringify([s.chosen, points]);
  const stale = s.runs.filter((r) => kept.get(r)?.mark !== marks.get(r) || kept.get(r)?.wanted !== wanted);
  if (stale.length) {
    const { curves } = await ask("curves", { ...query(s, stale), points });
    for (const r of stale) kept.set(r, { mark: marks.get(r), wanted, curves: curves.filter((c) => c.run === r) });
  }
  kept = new Map(s.runs.map((r) => [r, kept.get(r)]));
  return s.runs.flatMap((r) => kept.get(r).curves);
}

const loadVerdicts = (runs) => Promise.all(runs.slice(0, 8).map((run) => ask("verdict", { run })));

async function drawMatrixView(view, s) {
  await drawMatrices(view, s.runs);
}

async function drawVerdict(view, s, current) {
  const verdicts = await loadVerdicts(s.runs);
  if (current()) show(view, ...verdictView(verdicts));
}

async function drawSettings(view, s) {
  show(view, ...settingsView(s.details));
}

// ----------------------------------------------------------------------------------------------------------------- begin

const plain = new URL(location.href);
if (plain.searchParams.has("token")) { // it is in a cookie now
  plain.searchParams.delete("token");
  history.replaceState(null, "", plain);
}
onChange(draw);
onTheme(draw);
byId("filter").addEventListener("input", draw);
byId("choose").addEventListener("click", (e) => {
  const open = document.body.classList.toggle("choosing");
  e.currentTarget.setAttribute("aria-expanded", String(open));
});
byId("skip").addEventListener("click", (e) => {
  e.preventDefault();
  byId("view").focus();
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) poll();
});
setInterval(() => document.hidden || drawAges(list.runs, Date.now() / 1000 - skew), 1000);
poll();
