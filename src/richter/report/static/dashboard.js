// The page: asks for the list of runs again and again, loads what the view needs, and draws it.

import { Refused, ask } from "./dashboard-api.js";
import { byId, clear, el, layerName, nameLayers, show } from "./dashboard-dom.js";
import { emptyStore, message } from "./dashboard-empty.js";
import { looks, onTheme, swatch } from "./dashboard-look.js";
import { drawAges, drawChoice, drawRuns, isChosen } from "./dashboard-side.js";
import { change, onChange, state } from "./dashboard-state.js";

const POLL = { live: 1500, idle: 3000, most: 60000 }; // milliseconds

let list = { store: "", now: 0, runs: [] };
let views = []; // {name, title, script}: the tabs. A script exports draw, and perhaps choices, tools and forget
let skew = 0; // this clock minus the server's, in seconds

// ------------------------------------------------------------------------------------------------------------- the clock

let timer = 0;
let wait = POLL.live;

async function poll() {
  clearTimeout(timer);
  try {
    if (!views.length) ({ views } = await ask("views"));
    const answer = await ask("runs");
    if (answer !== list) {
      list = answer;
      skew = Date.now() / 1000 - answer.now;
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

const FEW = 4; // runs of a store that are all shown at first
let usual = []; // runs shown while nobody has chosen any

/** The runs to show: those chosen, or the one that is running, or else the latest; of a store with a few runs all. */
function chosenRuns() {
  const readable = list.runs.filter((r) => r.status !== "unreadable");
  if (state.runs !== null) return state.runs.filter((n) => readable.some((r) => r.name === n));
  const order = [...readable].sort((a, b) => (b.status === "running") - (a.status === "running") || b.updated - a.updated);
  const still = usual.length && usual.every((n) => readable.some((r) => r.name === n)); // no jump when a run ends
  if (order[0]?.status === "running") usual = [order[0].name];
  else if (!still) usual = (order.length <= FEW ? readable : order.slice(0, 1)).map((r) => r.name);
  return usual;
}

const union = (lists) => [...new Set(lists.flat())];

/** Everything the side and the views need to know about the chosen runs. */
function selection(runs, details) {
  const measures = union(details.map((d) => d.measures));
  const layers = union(details.map((d) => d.layers)).sort((a, b) => (a === "*") - (b === "*"));
  const scalars = union(details.map((d) => d.scalars));
  const first = union(details.map((d) => d.first));
  nameLayers(layers);
  const diverged = new Set(list.runs.filter((r) => /^diverged/.test(r.verdict ?? "")).map((r) => r.name));
  return {
    diverged,
    runs, measures, layers, scalars, cards: Object.assign({}, ...details.map((d) => d.cards).toReversed()), marks: new Map(list.runs.map((r) => [r.name, r.mark])),
    chosen: {
      measures: isChosen("measures", measures, measures.filter((m) => first.includes(m))),
      layers: isChosen("layers", layers, layers), scalars: isChosen("scalars", scalars, scalars.slice(0, 4)),
    },
  };
}

let turn = 0;

async function draw() {
  if (!views.length) return; // not connected yet
  const mine = ++turn;
  const runs = chosenRuns();
  try {
    const view = views.find((v) => v.name === state.view) ?? views[0];
    const [script, ...details] = await Promise.all([import(`./${view.script}`), ...runs.map((run) => ask("run", { run }))]);
    if (mine !== turn) return;
    const s = { name: view.name, ...selection(runs, details) };
    drawSide(s, script);
    drawBar(s, script);
    await drawView(s, script, () => mine === turn);
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

function drawSide(s, script) {
  const look = looks(s.runs, s.layers);
  byId("store").textContent = byId("store").title = list.store;
  drawRuns(list.runs, s.runs, look);
  drawAges(list.runs, Date.now() / 1000 - skew);
  const offered = (values) => (script.choices ? values : []);
  drawChoice("measures", "Measures", offered(s.measures), s.chosen.measures, { say: (m) => s.cards[m].title, hint: (m) => s.cards[m].sentence });
  drawChoice("layers", "Layers", offered(s.layers), s.chosen.layers, { say: layerName, hint: (k) => k, mark: (k) => swatch(layerLook(s, k)) });
  drawChoice("scalars", "Scalars", offered(s.scalars), s.chosen.scalars);
}

/** With several runs colours are theirs, and a layer is known by its dashes. */
function layerLook(s, layer) {
  const look = looks(s.runs, s.chosen.layers)(s.runs[0], layer);
  return s.runs.length > 1 ? { ...look, color: "currentColor" } : look;
}

function drawBar(s, script) {
  show(byId("views"), ...views.map(({ name, title }, i) => el("button", { type: "button", textContent: title, dataset: { key: name, view: name },
    "aria-current": s.name === name ? "page" : "false", onclick: () => change({ view: i ? name : null }) })));
  show(byId("tools"), ...(script.tools && s.runs.length ? script.tools(s) : []),
    el("button", { type: "button", textContent: "copy link", title: "The address of this view", dataset: { key: "link" }, onclick: copyLink }));
}

async function copyLink(event) {
  const button = event.currentTarget;
  await navigator.clipboard?.writeText(location.href).then(() => { button.textContent = "copied"; }, () => { button.textContent = "see address bar"; });
  setTimeout(() => { button.textContent = "copy link"; }, 1500);
}

let shown = {}; // what the view shows, and the script that drew it

async function drawView(s, script, current) {
  const view = byId("view");
  const key = !list.runs.length ? "no runs" : !s.runs.length && !script.everyRun ? "none chosen" : `view ${s.name}`;
  if (key !== shown.key) {
    shown.script?.forget?.();
    clear(view);
    byId("tip").hidden = true;
    shown = { key, script };
  }
  if (key === "no runs") show(view, emptyStore(list.store));
  else if (key === "none chosen") show(view, message("Choose a run on the left."));
  else await script.draw(view, s, current);
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
