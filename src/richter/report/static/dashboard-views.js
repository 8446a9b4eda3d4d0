// What stands beside the curves: verdicts in words, settings with their differences, the empty store.

import { address } from "./dashboard-api.js";
import { el, layerName } from "./dashboard-dom.js";

/** One line for each run, above the curves. */
export function verdictLines(verdicts) {
  return verdicts.slice(0, 4).map((v) => el("p", { className: "verdict-line" },
    el("strong", { textContent: v.run }), document.createTextNode(" "), el("span", { textContent: capital(v.verdict) })));
}

export function verdictView(verdicts) {
  return verdicts.map((v) => el("article", { className: "card verdict" },
    el("h3", { textContent: v.run }),
    el("p", { className: "headline", textContent: capital(v.verdict) }),
    v.layers.length ? el("ul", { className: "layers" }, ...v.layers.map((l) => el("li", {},
      el("span", { className: `badge ${l.verdict}`, textContent: l.verdict }),
      el("code", { textContent: layerName(l.layer) }), el("span", { textContent: l.words })))) : null,
    ...section("Evidence", v.evidence), ...section("Advice", v.advice), ...claims(v.claims), ...pictures(v),
    v.step === undefined || v.step === null ? null : el("p", { className: "faint", textContent: `As measured at step ${v.step.toLocaleString("en")}.` })));
}

const section = (title, lines) => (lines.length ? [el("h4", { textContent: title }), el("ul", {}, ...lines.map((t) => el("li", { textContent: t })))] : []);

/** What an experiment was to show, and whether it did. */
function claims(found) {
  if (!found.length) return [];
  const head = ["claim", "bar", "value", "in the paper", "verdict"];
  return [el("h4", { textContent: "Claims" }), el("div", { className: "scroll" }, el("table", { className: "settings claims" },
    el("thead", {}, el("tr", {}, ...head.map((t) => el("th", { scope: "col", textContent: t })))),
    el("tbody", {}, ...found.map((c) => el("tr", {},
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

/** A table of settings, runs side by side; rows that differ come first and are marked. */
export function settingsView(details) {
  const parts = [["Settings", "settings"], ["Seeds", "seeds"], ["Where and when it ran", "where"]];
  return parts.flatMap(([title, part]) => {
    const keys = [...new Set(details.flatMap((d) => Object.keys(d[part])))];
    if (!keys.length) return [];
    const rows = keys.map((key) => {
      const values = details.map((d) => d[part][key]);
      return { key, values, differs: values.some((v) => v !== values[0]) };
    }).sort((a, b) => b.differs - a.differs);
    const count = rows.filter((r) => r.differs).length;
    return [el("article", { className: "card" },
      el("h3", {}, title, details.length > 1 ? el("small", { textContent: count ? `${count} of ${keys.length} differ` : "all the same" }) : null),
      el("div", { className: "scroll" }, el("table", { className: "settings" },
        el("thead", {}, el("tr", {}, el("th", { scope: "col", textContent: "name" }), ...details.map((d) => el("th", { scope: "col", textContent: d.run })))),
        el("tbody", {}, ...rows.map((r) => el("tr", { className: r.differs ? "differs" : "" },
          el("th", { scope: "row", textContent: r.key }), ...r.values.map((v) => el("td", { textContent: v ?? "–" }))))))))];
  });
}

export function emptyStore(store) {
  return el("article", { className: "card empty" },
    el("h3", { textContent: "No runs yet" }),
    el("p", {}, "Runs written below ", el("code", { textContent: store }), " appear here by themselves, while they train. In your training script:"),
    el("pre", { textContent: `import richter\n\nprobe = richter.Probe(x[:256], y[:256])\nwatch = richter.Observer(model, probe, run=${JSON.stringify(`${store}/first`)})\n\nfor step, (xb, yb) in enumerate(loader):\n    loss = train_step(model, xb, yb)\n    watch(step, loss=loss)` }));
}

export const message = (text) => el("article", { className: "card empty" }, el("p", { textContent: text }));
