// Panels of curves: one for each measure and scalar, zoomed together along the steps. Drawn by plotly, whose labels know some
// markup; so only our own words are given to it, and names that go into an exported figure are escaped.

import { address } from "./dashboard-api.js";
import { byId, download, el, layerName, measured, shortened } from "./dashboard-dom.js";
import { ink, looks, swatch, theme } from "./dashboard-look.js";
import { change, note, state } from "./dashboard-state.js";

const panels = new Map();
export const FONT = 'system-ui, -apple-system, "Segoe UI", sans-serif';
export const CONFIG = { displayModeBar: false, responsive: true, showTips: false };
const BANDS = 8; // curves in a panel up to which errors are drawn
const TIP = 14; // lines of a tooltip
const LEGEND = 12; // curves up to which a panel has a legend
const MARKED = 60; // points up to which a curve has a marker at each
const FAR = 4; // times the range of the other runs: beyond it a diverged run does not set the axis
const MANY = 40; // curves in a panel above which neighbours are drawn as one: plotly takes its time for every trace
const TRACES = 24; // which are then about so many

/** A name as plotly shows it literally. */
export const literal = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

/**
 * Draw panels into a grid; those that stay keep their zoom. A panel has a key, a title, a hint, its curves, the runs and layers that
 * colours and dashes tell apart, and perhaps words below its title, a table (the question whose answer are all its points), a legend, and an axis of its own
 * (the word for it, and names of the places 1, 2, ... on it), which is not zoomed with the steps.
 */
export function drawPanels(grid, wanted) {
  for (const [key, panel] of panels) {
    if (wanted.some((w) => w.key === key)) continue;
    forget(panel);
    panel.node.remove();
    panels.delete(key);
  }
  wanted.forEach((w, i) => {
    const fresh = !panels.has(w.key);
    if (fresh) panels.set(w.key, made(w.key));
    const panel = Object.assign(panels.get(w.key), { table: null, words: "", legend: w.curves.length > 1 && w.curves.length <= LEGEND, axis: "", ticks: [], diverged: new Set() }, w);
    if (grid.children[i] !== panel.node) grid.insertBefore(panel.node, grid.children[i] ?? null);
    if (fresh) watcher.observe(panel.node);
    panel.heading.textContent = w.title;
    panel.heading.title = w.hint || w.title;
    const words = [panel.words, usual(panel) ? `${[...new Set(panel.curves.map((c) => c.run))].filter((r) => panel.diverged.has(r)).join(", ")} diverged; the axis shows the others.` : ""].filter(Boolean).join(" ");
    panel.said.textContent = words;
    panel.said.hidden = !words;
    panel.log.setAttribute("aria-pressed", String(isLog(w.key)));
    panel.csv.hidden = !panel.table;
    if (panel.table) panel.csv.href = address("curves.csv", panel.table);
    panel.stale = true;
    if (panel.near) enqueue(panel);
  });
}

// Only panels on or near the screen are drawn, one in a task, so that the page answers while many of them change.

const watcher = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    const panel = panels.get(target.dataset.panel);
    if (!panel || panel.node !== target) continue;
    panel.near = isIntersecting;
    if (panel.near) enqueue(panel);
  }
}, { rootMargin: "200px" });
const queue = new Set();

function enqueue(panel) {
  if (!queue.size) setTimeout(work);
  queue.add(panel);
}

function work() {
  const [panel] = queue;
  queue.delete(panel);
  if (panels.get(panel.key) === panel) {
    if (panel.stale) drawPanel(panel);
    else move(panel);
  }
  if (queue.size) setTimeout(work);
}

export function forgetPanels() {
  for (const panel of panels.values()) forget(panel);
  panels.clear();
}

function forget(panel) {
  watcher.unobserve(panel.node);
  Plotly.purge(panel.plot);
}

function made(key) {
  const button = (text, title, onclick, more = {}) => el("button", { type: "button", textContent: text, title, onclick, ...more });
  const heading = el("h3");
  const said = el("p", { className: "faint said" });
  const plot = el("div", { className: "plot" });
  const log = button("log", "Logarithmic values (L)", () => toggleLog(key), { "aria-pressed": "false" });
  const csv = el("a", { textContent: "CSV", title: "All points as a table", download: "richter-curves.csv" });
  const node = el("figure", { className: "panel", tabIndex: 0, dataset: { panel: key } },
    el("figcaption", {}, heading, el("span", { className: "buttons" }, log,
      button("wide", "Larger or smaller (W)", () => widen(node)),
      button("SVG", "Save this figure as SVG", () => save(panels.get(key), "svg")),
      button("PNG", "Save this figure as PNG", () => save(panels.get(key), "png")), csv)), said, plot);
  node.setAttribute("aria-label", "Curves. Arrow keys move, + and - zoom, 0 shows everything, L switches to logarithmic values.");
  node.addEventListener("keydown", (event) => event.target === node && onKey(event, key));
  return { key, node, plot, heading, said, log, csv, ready: false, near: false, stale: true };
}

function drawPanel(panel) {
  panel.stale = false;
  Plotly.react(panel.plot, traces(panel, looks(panel.runs, panel.layers)), panelLayout(panel), { ...CONFIG, doubleClick: "reset" });
  if (panel.ready) return;
  panel.ready = true;
  panel.plot.on("plotly_relayout", (e) => panel.axis || zoomed(e));
  panel.plot.on("plotly_doubleclick", () => zoom(null));
  panel.plot.on("plotly_hover", (e) => tip(panel, e));
  panel.plot.on("plotly_unhover", () => { byId("tip").hidden = true; });
}

function traces(panel, look, most = 22) {
  const log = isLog(panel.key);
  const alone = panel.runs.length > 1 && panel.curves.every((c) => c.layer === panel.curves[0].layer); // no dash tells layers apart
  const lines = panel.curves.map((c, i) => {
    const l = alone ? { ...look(c.run, c.layer), dash: "solid" } : look(c.run, c.layer);
    const trivial = c.mark === "trivial";
    return {
      x: c.step.map((v) => place(v, panel)), y: c.value, customdata: c.step.map((_, j) => [i, j]), name: literal(shortened(label(panel, c), most)), hoverinfo: "none", type: "scatter",
      mode: c.step.length > MARKED || trivial ? "lines" : "lines+markers", marker: { size: panel.curves.length > BANDS ? 2.5 : 3.5 }, opacity: trivial ? 0.45 : 1, connectgaps: false,
      line: { color: l.color, dash: trivial ? "dot" : l.dash, width: panel.curves.length > BANDS ? 1.2 : 1.7 },
    };
  });
  if (panel.curves.length > MANY) return together(lines);
  if (panel.curves.length > BANDS) return lines;
  return [...panel.curves.map((c) => band(panel, c, look(c.run, c.layer).color, log)), ...lines];
}

/** Neighbours of one look, or nearly so, behind each other, with a gap after each. */
function together(lines) {
  const groups = new Map();
  const style = (line) => [line.line.dash, line.opacity].join();
  const shades = Math.max(4, Math.round(TRACES / new Set(lines.map(style)).size));
  lines.forEach((line, i) => {
    const key = [Math.floor((i * shades) / lines.length), style(line)].join();
    groups.set(key, [...(groups.get(key) ?? []), line]);
  });
  return [...groups.values()].map((mine) => ({ ...mine[Math.floor(mine.length / 2)], mode: "lines",
    name: mine.length > 1 ? `${mine[0].name} and ${mine.length - 1} more` : mine[0].name,
    ...Object.fromEntries(["x", "y", "customdata"].map((key) => [key, mine.flatMap((line) => [...line[key], null])])) }));
}

/** The standard error above and below, as one closed shape. */
function band(panel, c, color, log) {
  const at = c.step.flatMap((_, i) => (c.value[i] === null ? [] : [i]));
  const edge = (i, sign) => {
    const v = c.value[i] + sign * (c.error[i] ?? 0);
    return log && v <= 0 ? c.value[i] : v;
  };
  const back = at.toReversed();
  return {
    x: [...at, ...back].map((i) => place(c.step[i], panel)), y: [...at.map((i) => edge(i, 1)), ...back.map((i) => edge(i, -1))],
    type: "scatter", mode: "lines", line: { width: 0 }, fill: "toself", fillcolor: `${color}2b`, hoverinfo: "skip", showlegend: false,
  };
}

/** Stages: a dotted line at the time of each drop, with how well it is known as a band, and pale bars at the levels of plateaus. */
function stageMarks(panel, which) {
  const look = looks(panel.runs, panel.layers, which);
  const shape = (more) => ({ type: "line", layer: "below", xref: "x", yref: "y", ...more });
  return panel.curves.filter((c) => c.stages).flatMap((c) => {
    const { color } = look(c.run, c.layer);
    const tall = { yref: "paper", y0: 0, y1: 1 };
    return [
      ...c.stages.plateaus.map((p) => shape({ x0: place(p.start), x1: place(p.end), y0: p.level, y1: p.level, line: { color: `${color}44`, width: 5 } })),
      ...c.stages.drops.map((d) => shape({ ...tall, type: "rect", x0: place(Math.max(0, d.low)), x1: place(d.high), fillcolor: `${color}1c`, line: { width: 0 } })),
      ...c.stages.drops.map((d) => shape({ ...tall, x0: place(d.time), x1: place(d.time), line: { color, width: 1, dash: "dot" } })),
    ];
  });
}

function panelLayout(panel, which = theme()) {
  const c = ink(which);
  const axis = { gridcolor: c.grid, linecolor: c.line, tickfont: { size: 10.5, color: c.faint }, zeroline: false };
  return {
    autosize: true, margin: { l: 50, r: 12, t: 8, b: 36 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: FONT, size: 11, color: c.text }, showlegend: panel.legend, hovermode: "x", hoverdistance: 40, dragmode: state.pan ? "pan" : "zoom",
    legend: { x: 1.02, xanchor: "left", y: 1, bgcolor: "rgba(0,0,0,0)", font: { size: 10.5 }, itemwidth: 30, tracegroupgap: 0 },
    shapes: panel.axis ? [] : stageMarks(panel, which),
    uirevision: `${panel.key} ${isLog(panel.key)} ${state.logx}`,
    xaxis: { ...axis, ...(panel.axis ? named(panel) : steps(panel.curves)), title: { text: literal(panel.axis || "step"), font: { size: 10.5, color: c.faint }, standoff: 4 },
      showspikes: true, spikemode: "across", spikethickness: 1, spikedash: "solid", spikecolor: c.line },
    yaxis: { ...axis, type: isLog(panel.key) ? "log" : "linear", exponentformat: "power", nticks: 6,
      ...(usual(panel) ? { range: usual(panel), autorange: false } : { autorange: true }) },
  };
}

/** The range of the values of runs that did not diverge, if those of the others lie far beyond it; otherwise nothing. */
function usual(panel) {
  if (!panel.diverged.size) return null;
  const log = isLog(panel.key);
  const real = (curves) => curves.flatMap((c) => c.value.filter((v) => Number.isFinite(v) && (!log || v > 0))).map((v) => (log ? Math.log10(v) : v));
  const sound = real(panel.curves.filter((c) => !panel.diverged.has(c.run)));
  const all = real(panel.curves);
  if (!sound.length || sound.length === all.length) return null;
  const [low, high, bottom, top] = [least(sound), most(sound), least(all), most(all)];
  const room = 0.06 * (high - low || Math.abs(high) || 1);
  return top - bottom > FAR * (high - low) ? [low - room, high + room] : null;
}

const least = (values) => values.reduce((a, b) => Math.min(a, b));
const most = (values) => values.reduce((a, b) => Math.max(a, b));

// ------------------------------------------------------------------------------------------------ steps, zoom and keys

// A logarithmic axis shows step + 1 and says step, so that the first measurement, at step 0, has a place.
const place = (step, { axis } = {}) => (state.logx && !axis ? step + 1 : step);
const onAxis = (step) => (state.logx ? Math.log10(Math.max(step, -0.9) + 1) : step);
const offAxis = (at) => (state.logx ? 10 ** at - 1 : at);

function steps(curves) {
  const last = Math.max(1, ...curves.map((c) => c.step.at(-1) ?? 0));
  const range = (state.x ?? [0, last * (state.logx ? 1 : 1.02)]).map(onAxis);
  if (!state.logx) return { type: "linear", range, tickmode: "auto", nticks: 7 };
  const wide = range[1] - range[0] > 2;
  const ticks = [0];
  for (let k = 1; k <= last * 10; k *= 10) ticks.push(...(wide ? [k] : [k, 2 * k, 5 * k]));
  return { type: "log", range, tickmode: "array", tickvals: ticks.map((t) => place(t)), ticktext: ticks.map((t) => t.toLocaleString("en")) };
}

const TICKS = 12; // names on an axis

/** An axis of its own: all of it, with some of the names of its places. */
function named({ curves, ticks }) {
  const all = curves.flatMap((c) => c.step);
  const range = [Math.min(...all) - 0.3, Math.max(...all) + 0.3];
  if (!ticks.length) return { type: "linear", range, tickmode: "auto", nticks: 7 };
  const every = Math.ceil(ticks.length / TICKS);
  const at = ticks.map((_, i) => i + 1).filter((i) => (i - 1) % every === 0);
  return { type: "linear", range, tickmode: "array", tickvals: at, ticktext: at.map((i) => literal(shortened(layerName(ticks[i - 1]), 18))) };
}

function zoomed(event) {
  const ends = [event["xaxis.range[0]"], event["xaxis.range[1]"]];
  if (ends.every((v) => v !== undefined)) zoom(ends.map(offAxis));
  else if (event["xaxis.autorange"]) zoom(null);
}

/** All panels show these steps. Nothing is asked of the server for it, and no curve is made anew. */
function zoom(x) {
  note({ x });
  for (const panel of panels.values()) {
    if (panel.axis) continue;
    if (panel.near) enqueue(panel);
    else panel.stale = true;
  }
}

function move({ axis, ready, plot, curves }) {
  if (axis || !ready) return;
  const { range, tickvals, ticktext } = steps(curves);
  if (range.every((v, i) => v === plot.layout.xaxis.range[i])) return; // by hand, or it was so before
  Plotly.relayout(plot, { "xaxis.range": range, ...(tickvals ? { "xaxis.tickvals": tickvals, "xaxis.ticktext": ticktext } : {}) });
}

function onKey(event, key) {
  const { plot, node, ready, axis } = panels.get(key);
  if (!ready) return;
  const [low, high] = plot.layout.xaxis.range;
  const [width, middle] = [high - low, (high + low) / 2];
  const to = (a, b) => zoom([offAxis(a), offAxis(b)]);
  const act = {
    ArrowLeft: () => to(low - width / 10, high - width / 10), ArrowRight: () => to(low + width / 10, high + width / 10),
    "+": () => to(middle - width / 3, middle + width / 3), "=": () => to(middle - width / 3, middle + width / 3),
    "-": () => to(middle - width * 0.75, middle + width * 0.75), 0: () => resetZoom(), l: () => toggleLog(key), w: () => widen(node),
  }[event.key];
  if (!act || (axis && !"lw".includes(event.key)) || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  act();
}

export function resetZoom() {
  for (const panel of panels.values()) {
    if (panel.ready) Plotly.relayout(panel.plot, usual(panel) ? { "yaxis.range": usual(panel) } : { "yaxis.autorange": true });
  }
  zoom(null);
}

function widen(node) {
  node.classList.toggle("wide");
  Plotly.Plots.resize(node.querySelector(".plot"));
}

const isLog = (key) => (state.logy ?? []).includes(key);
const toggleLog = (key) => change({ logy: isLog(key) ? state.logy.filter((k) => k !== key) : [...(state.logy ?? []), key] });

// ---------------------------------------------------------------------------------------------------- hover and export

function label(panel, c) {
  const layer = c.layer === null ? "" : layerName(c.layer);
  if (panel.runs.length < 2) return layer || c.measure;
  return layer && panel.curves.some((other) => other.layer !== c.layer) ? `${c.run} · ${layer}` : c.run;
}

function tip(panel, event) {
  const box = byId("tip");
  const look = looks(panel.runs, panel.layers);
  const pointer = event.yvals?.[0] ?? 0;
  const points = event.points.filter((p) => p.customdata && p.y !== null)
    .sort((a, b) => Math.abs(a.y - pointer) - Math.abs(b.y - pointer)).slice(0, TIP).sort((a, b) => b.y - a.y);
  if (!points.length) return;
  const lines = points.map((p) => {
    const [c, j] = [panel.curves[p.customdata[0]], p.customdata[1]];
    return el("tr", {}, el("td", {}, swatch(look(c.run, c.layer))), el("td", { textContent: label(panel, c) }),
      el("td", { className: "value", textContent: measured(c.value[j], c.error[j]) }),
      c.note ? el("td", { className: "note", textContent: c.mark === "trivial" ? "by definition" : c.note }) : null);
  });
  const first = points[0];
  const more = event.points.filter((p) => p.customdata).length - points.length;
  const at = panel.curves[first.customdata[0]].step[first.customdata[1]];
  box.replaceChildren(el("strong", { textContent: `${panel.axis || "step"} ${panel.ticks[at - 1] ?? at.toLocaleString("en")}` }),
    el("table", {}, el("tbody", {}, ...lines)), more > 0 ? el("small", { textContent: `and ${more} more` }) : "");
  box.hidden = false;
  const { clientX: x, clientY: y } = event.event;
  const left = x + box.offsetWidth + 24 > innerWidth ? x - box.offsetWidth - 16 : x + 16;
  box.style.left = `${Math.max(4, left)}px`;
  box.style.top = `${Math.max(4, Math.min(y - 10, innerHeight - box.offsetHeight - 8))}px`;
}

async function save(panel, format) {
  const layout = panelLayout(panel, "light");
  Object.assign(layout, { paper_bgcolor: "#ffffff", plot_bgcolor: "#ffffff", showlegend: true, margin: { l: 60, r: 20, t: 48, b: 48 },
    title: { text: literal(panel.title), font: { size: 15 } }, legend: { font: { size: 11 } } });
  layout.yaxis.range = [...panel.plot.layout.yaxis.range];
  await saveFigure({ data: traces(panel, looks(panel.runs, panel.layers, "light"), 1000), layout }, panel.key, format);
}

/** A figure as a file. */
export async function saveFigure(figure, name, format, size = { width: 800, height: 480 }) {
  const url = await Plotly.toImage(figure, { format, scale: format === "png" ? 2 : 1, ...size });
  const file = `richter-${name.replace(/[^\w.-]+/g, "_").slice(0, 60)}.${format}`;
  download(url, file);
}
