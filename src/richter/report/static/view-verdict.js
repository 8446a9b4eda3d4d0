// Lazy or rich, in words and layer by layer, with evidence and advice; of an experiment its claims and its pictures.

import { address, ask } from "./dashboard-api.js";
import { el, layerName, show } from "./dashboard-dom.js";

const MOST = 8; // runs whose verdicts are shown

export const loadVerdicts = (runs) => Promise.all(runs.slice(0, MOST).map((run) => ask("verdict", { run })));

export async function draw(view, { runs }, current) {
  const verdicts = await loadVerdicts(runs);
  if (current()) show(view, ...verdicts.map(card));
}

/** One line for each run, above the curves. */
export function verdictLines(verdicts) {
  return verdicts.slice(0, 4).map((v) => el("p", { className: "verdict-line" },
    el("strong", { textContent: v.run }), document.createTextNode(" "), ...magnitude(v), el("span", { textContent: capital(v.verdict) })));
}

/** The one number that people can say, beside the verdict's word. */
const magnitude = (v) => (v.magnitude ? [el("span", { className: "magnitude", title: `log10(G / (1 - G)) of the linearisation gap G, at step ${v.step}`,
  textContent: `magnitude ${v.magnitude.text}` })] : []);

function card(v) {
  return el("article", { className: "card verdict" },
    el("h3", { textContent: v.run }),
    el("p", { className: "headline" }, ...magnitude(v), capital(v.verdict)),
    v.measured ? el("p", { className: "faint measured", textContent: capital(v.measured) }) : null,
    v.layers.length ? el("ul", { className: "layers" }, ...v.layers.map((l) => el("li", {},
      el("span", { className: `badge ${l.verdict.replace(" ", "-")}`, textContent: l.verdict }),
      el("code", { textContent: layerName(l.layer) }), el("span", { textContent: l.words })))) : null,
    ...section("Remarks", v.remarks), ...section("What it cannot tell", v.unknown), ...section("Evidence", v.evidence),
    ...section("Advice", v.advice), ...claims(v.claims), ...pictures(v));
}

const section = (title, lines) => (lines.length ? [el("h4", { textContent: title }), el("ul", {}, ...lines.map((t) => el("li", { textContent: t })))] : []);

/** What an experiment was to show, and whether it did. */
function claims(records) {
  if (!records.length) return [];
  const head = ["claim", "bar", "value", "in the paper", "verdict"];
  return [el("h4", { textContent: "Claims" }), el("div", { className: "scroll" }, el("table", { className: "settings claims" },
    el("thead", {}, el("tr", {}, ...head.map((t) => el("th", { scope: "col", textContent: t })))),
    el("tbody", {}, ...records.map((c) => el("tr", {},
      el("th", { scope: "row" }, c.text, c.remark ? el("div", { className: "faint", textContent: c.remark }) : null),
      ...[c.bar, c.value, c.paper].map((t) => el("td", { textContent: t })),
      el("td", { className: c.holds === null ? "" : c.holds ? "holds" : "fails", textContent: c.verdict }))))))];
}

/** Pictures stored with the run: each once, as images, in which nothing can run. */
function pictures({ run, figures }) {
  const once = figures.filter((f) => !figures.some((g) => g.name === f.name && g.kind > f.kind));
  return once.length ? [el("h4", { textContent: "Pictures" }), ...once.map((f) => el("figure", { className: "picture" },
    el("img", { loading: "lazy", alt: f.name, src: address("figure", { run, ...f }) }), el("figcaption", { className: "faint", textContent: f.name })))] : [];
}

const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);
