// The matrices of a layer at a step, side by side, with their spectra.

import { address, ask } from "./dashboard-api.js";
import { CONFIG, FONT, literal, saveFigure } from "./dashboard-charts.js";
import { byId, el, layerName, number, show } from "./dashboard-dom.js";
import { colour, ink, theme } from "./dashboard-look.js";
import { change, state } from "./dashboard-state.js";

const MOST = 4; // matrices side by side
const cards = new Map();
let turn = 0;

/** Load and draw what the state asks for, of one of the chosen runs. */
export async function draw(view, { runs }) {
  const mine = ++turn;
  const run = runs.includes(state.from) ? state.from : runs[0];
  const { arrays } = await ask("matrices", { run });
  if (mine !== turn) return;
  if (!arrays.length) return empty(view, `The run ${run} holds no matrices. An Observer keeps them if asked to; Writer.array writes your own.`);
  const layers = [...new Set(arrays.map((a) => a.layer))];
  const layer = layers.includes(state.layer) ? state.layer : layers[0];
  const here = arrays.filter((a) => a.layer === layer);
  const names = here.map((a) => a.name);
  const chosen = (state.arrays ?? names).filter((n) => names.includes(n)).slice(0, MOST);
  const steps = [...new Set(here.filter((a) => chosen.includes(a.name)).flatMap((a) => a.steps))].sort((a, b) => a - b);
  const step = steps.findLast((s) => state.step === null || s <= state.step) ?? steps[0];
  const wanted = chosen.map((name) => {
    const own = here.find((a) => a.name === name).steps;
    return { run, name, layer, step: own.findLast((s) => s <= step) ?? own[0] };
  });
  const loaded = await Promise.all(wanted.map((w) => ask("matrix", w)));
  if (mine !== turn) return;
  const [controls, grid] = frame(view);
  drawControls(controls, { runs, run, layers, layer, names, chosen, steps, step });
  drawCards(grid, wanted, loaded, step);
}

export function forget() {
  turn += 1; // whatever is still being loaded comes too late
  clear();
}

function clear() {
  for (const card of cards.values()) Plotly.purge(card.plot);
  cards.clear();
}

function empty(view, text) {
  clear();
  view.replaceChildren(el("article", { className: "card empty" }, el("p", { textContent: text })));
}

function frame(view) {
  if (view.firstElementChild?.id !== "controls") {
    clear();
    view.replaceChildren(el("div", { id: "controls", className: "card" }), el("div", { className: "matrices" }));
  }
  return view.children;
}

function drawControls(box, { runs, run, layers, layer, names, chosen, steps, step }) {
  const choice = (title, key, values, value, say = (v) => v) => el("label", {}, title, " ",
    el("select", { dataset: { key }, "aria-label": title, onchange: (e) => change({ [key]: values[e.target.selectedIndex] }) },
      ...values.map((v) => {
        const option = el("option", { textContent: say(v), dataset: { on: v === value } });
        option.selected = v === value;
        return option;
      })));
  const at = steps.indexOf(step);
  const go = (i) => change({ step: i >= steps.length - 1 ? null : steps[Math.max(0, i)] });
  const slider = el("input", { type: "range", min: 0, max: Math.max(0, steps.length - 1), dataset: { key: "step" }, "aria-label": "Step",
    "aria-valuetext": `step ${step}`, oninput: (e) => go(Number(e.target.value)) });
  slider.setAttribute("value", at);
  show(box, runs.length > 1 ? choice("Run", "from", runs, run) : null, choice("Layer", "layer", layers, layer, layerName),
    ...(names.length > 1 ? names.map((n) => {
      const input = el("input", { type: "checkbox", dataset: { key: `array ${n}`, on: chosen.includes(n) },
        onchange: (e) => change({ arrays: e.target.checked ? [...chosen, n] : chosen.filter((k) => k !== n) }) });
      input.checked = chosen.includes(n);
      return el("label", { className: "check" }, input, n);
    }) : []),
    el("span", { className: "slider" },
      el("button", { type: "button", textContent: "‹", title: "Earlier", dataset: { key: "earlier" }, onclick: () => go(at - 1) }), slider,
      el("button", { type: "button", textContent: "›", title: "Later", dataset: { key: "later" }, onclick: () => go(at + 1) }),
      el("output", { textContent: step === undefined ? "" : `step ${step.toLocaleString("en")}${at === steps.length - 1 ? " (last)" : ""}` })));
}

function drawCards(grid, wanted, loaded, step) {
  const keys = [...wanted.map((w) => `m ${w.name}`), "spectra"];
  for (const [key, card] of cards) {
    if (keys.includes(key)) continue;
    Plotly.purge(card.plot);
    card.node.remove();
    cards.delete(key);
  }
  wanted.forEach((w, i) => {
    const card = placed(grid, keys[i], i);
    card.heading.textContent = `${w.name} of ${layerName(w.layer)}`;
    const whole = loaded[i].shape.every((n, k) => n === loaded[i].shown[k]);
    card.words.textContent = card.words.title = `${loaded[i].shape.join(" × ")}, from ${number(loaded[i].low)} to ${number(loaded[i].high)}`
      + (whole ? "" : "; a point is the largest of its block") + (w.step === step ? "" : `; of step ${w.step.toLocaleString("en")}`);
    card.csv.href = address("matrix.csv", w);
    card.csv.hidden = false;
    card.figure = (which) => (loaded[i].shape.length === 1 ? vectorFigure(loaded[i], which) : matrixFigure(loaded[i], which));
    card.title = `${w.name} of ${layerName(w.layer)}, step ${w.step}`;
    drawCard(card);
  });
  const spectra = placed(grid, "spectra", wanted.length);
  spectra.node.hidden = !loaded.some((f) => f.spectrum.length);
  spectra.heading.textContent = "Spectra";
  const say = loaded.map((f, i) => f.spectrum_words && `${wanted[i].name}: ${f.spectrum_words}`).filter(Boolean);
  spectra.words.textContent = spectra.words.title = say.join("; ");
  spectra.figure = (which) => spectrumFigure(wanted, loaded, which);
  spectra.title = `Spectra, ${layerName(wanted[0]?.layer ?? "")}, step ${wanted[0]?.step ?? ""}`;
  if (!spectra.node.hidden) drawCard(spectra);
}

function placed(grid, key, i) {
  if (!cards.has(key)) {
    const card = { key, heading: el("h3"), words: el("p", { className: "faint" }), plot: el("div", { className: "plot tall" }),
      csv: el("a", { textContent: "CSV", title: "All entries as a table", download: "richter-matrix.csv", hidden: true }) };
    const button = (format) => el("button", { type: "button", textContent: format.toUpperCase(), title: `Save as ${format.toUpperCase()}`, onclick: () => save(card, format) });
    card.node = el("figure", { className: "panel", dataset: { panel: key } },
      el("figcaption", {}, card.heading, el("span", { className: "buttons" }, button("svg"), button("png"), card.csv)), card.words, card.plot);
    cards.set(key, card);
  }
  const card = cards.get(key);
  if (grid.children[i] !== card.node) grid.insertBefore(card.node, grid.children[i] ?? null);
  return card;
}

function drawCard(card) {
  const { data, layout } = card.figure(theme());
  Plotly.react(card.plot, data, layout, CONFIG);
  if (card.ready) return;
  card.ready = true;
  card.plot.on("plotly_hover", (e) => tip(e));
  card.plot.on("plotly_unhover", () => { byId("tip").hidden = true; });
}

function tip({ points: [p], event }) {
  const box = byId("tip");
  const text = p.z === undefined ? `${p.x}: ${number(p.y)}` : `[${p.y}, ${p.x}]  ${number(p.z)}`;
  box.replaceChildren(el("span", { className: "value", textContent: text }));
  box.hidden = false;
  box.style.left = `${Math.min(event.clientX + 14, innerWidth - box.offsetWidth - 8)}px`;
  box.style.top = `${event.clientY - 34}px`;
}

async function save(card, format) {
  const figure = card.figure("light");
  Object.assign(figure.layout, { paper_bgcolor: "#ffffff", title: { text: literal(card.title), font: { size: 14 } }, margin: { l: 56, r: 20, t: 48, b: 48 } });
  await saveFigure(figure, card.title, format, { width: 640, height: 560 });
}

// --------------------------------------------------------------------------------------------------------------- figures

function base(which) {
  const c = ink(which);
  const axis = { gridcolor: c.grid, linecolor: c.line, tickfont: { size: 10.5, color: c.faint }, zeroline: false, automargin: true };
  return [axis, { autosize: true, margin: { l: 40, r: 8, t: 6, b: 34 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: FONT, size: 11, color: c.text }, dragmode: "zoom", hovermode: "closest", uirevision: "same" }];
}

/** Entries as colours around the paper's colour for zero; the largest half per cent share the strongest. */
function matrixFigure(f, which) {
  const [axis, layout] = base(which);
  const flat = floats(f.data);
  const sizes = flat.map(Math.abs).filter(Number.isFinite).sort();
  const top = sizes[Math.floor(0.995 * (sizes.length - 1))] || sizes.at(-1) || 1;
  const [rows, columns] = f.shown;
  const block = f.shape.map((n, k) => Math.ceil(n / f.shown[k]));
  const z = Array.from({ length: rows }, (_, i) => Array.from(flat.subarray(i * columns, (i + 1) * columns)));
  const zero = ink(which).zero;
  const scale = which === "dark" // red is positive and blue negative, as in reports
    ? [[0, "#8fd0ff"], [0.25, "#1f6fae"], [0.5, zero], [0.75, "#b0392f"], [1, "#ff9c85"]]
    : [[0, "#053061"], [0.25, "#6baed6"], [0.5, zero], [0.75, "#e58368"], [1, "#67001f"]];
  return {
    data: [{ type: "heatmap", z, x0: 0, dx: block[1], y0: 0, dy: block[0], zmin: -top, zmax: top, colorscale: scale, hoverinfo: "none",
      colorbar: { orientation: "h", y: -0.11, yanchor: "top", thickness: 7, len: 0.9, outlinewidth: 0, nticks: 5, exponentformat: "power",
        tickfont: { size: 10, color: ink(which).faint } } }],
    layout: { ...layout, xaxis: { ...axis, showgrid: false, ticks: "", constrain: "domain", scaleanchor: "y" }, yaxis: { ...axis, showgrid: false, ticks: "", autorange: "reversed", constrain: "domain" } },
  };
}

function vectorFigure(f, which) {
  const [axis, layout] = base(which);
  return {
    data: [{ type: "scatter", mode: "lines", y: Array.from(floats(f.data)), line: { color: colour(0, 1, which), width: 1.6 }, hoverinfo: "none" }],
    layout: { ...layout, xaxis: axis, yaxis: axis },
  };
}

function spectrumFigure(wanted, loaded, which) {
  const [axis, layout] = base(which);
  const data = loaded.map((f, i) => ({
    type: "scatter", mode: "lines+markers", name: literal(wanted[i].name), x: f.spectrum.map((_, k) => k + 1),
    y: f.spectrum.map((v) => v / (f.spectrum[0] || 1)), marker: { size: 4 }, line: { color: colour(i, Math.max(2, loaded.length), which), width: 1.5 }, hoverinfo: "none",
  })).filter((d) => d.x.length);
  return {
    data,
    layout: { ...layout, showlegend: true, legend: { x: 1.02, xanchor: "left", y: 1, bgcolor: "rgba(0,0,0,0)", font: { size: 10.5 } },
      xaxis: { ...axis, type: "log", title: { text: "rank", standoff: 4 }, dtick: 1 },
      yaxis: { ...axis, type: "log", exponentformat: "power", title: { text: "share of the largest", standoff: 4 }, dtick: 1 } },
  };
}

function floats(text) {
  return new Float32Array(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
}
