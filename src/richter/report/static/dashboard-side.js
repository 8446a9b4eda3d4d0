// The list of runs, and the choice of measures, layers and scalars.

import { ago, byId, el, show } from "./dashboard-dom.js";
import { swatch } from "./dashboard-look.js";
import { change, state } from "./dashboard-state.js";

const MOST = 24; // runs that "all" chooses
const SIGNS = { running: "●", finished: "✓", interrupted: "◐", failed: "✕", unreadable: "?" };

export function drawRuns(runs, chosen, look) {
  const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const matching = runs.filter((r) => words.every((w) => `${r.name} ${r.status} ${r.verdict ?? ""}`.toLowerCase().includes(w)));
  byId("count").textContent = words.length ? `${matching.length} of ${runs.length}` : String(runs.length);
  const readable = matching.filter((r) => r.status !== "unreadable").slice(0, MOST).map((r) => r.name);
  const choose = (text, names, title) => el("button", { type: "button", textContent: text, title, dataset: { key: `runs ${text}` }, onclick: () => change({ runs: names }) });
  show(byId("some"), choose("all", readable, `Show all listed runs, at most ${MOST}`), choose("none", [], "Show no run"));
  show(byId("runs"), ...matching.map((r) => line(r, chosen, look)));
}

/** Ages move on although nothing else does: only their texts are touched. */
export function drawAges(runs, now) {
  const updated = new Map(runs.map((r) => [r.name, r.updated]));
  for (const node of byId("runs").querySelectorAll("[data-age]")) {
    const text = ago(now - updated.get(node.dataset.age));
    if (node.textContent !== text) node.textContent = text;
  }
}

function line(run, chosen, look) {
  const on = chosen.includes(run.name);
  const readable = run.status !== "unreadable";
  const box = el("input", { type: "checkbox", disabled: !readable, dataset: { key: `run ${run.name}`, on },
    onchange: (e) => change({ runs: e.target.checked ? [...chosen, run.name] : chosen.filter((n) => n !== run.name) }) });
  box.checked = on;
  const kind = run.status in SIGNS ? run.status : "finished";
  return el("li", { className: on ? "on" : "" }, el("label", { title: run.name }, box,
    el("span", { className: "name", textContent: run.name }), on && chosen.length > 1 ? swatch(look(run.name, "")) : null,
    el("span", { className: "meta" },
      el("span", { className: `status ${kind}`, textContent: `${SIGNS[kind]} ${run.status}` }),
      run.progress === null ? null : el("span", { textContent: `${Math.floor(100 * run.progress)} %`, title: "Done, as the run says" }),
      run.last === null ? null : el("span", { textContent: `step ${run.last.toLocaleString("en")}` }),
      readable ? el("span", { dataset: { age: run.name } }) : null),
    run.verdict ? el("span", { className: "meta word", textContent: run.verdict, title: `Verdict: ${run.verdict}` }) : null,
    run.reason ? el("span", { className: "reason", textContent: run.reason, title: run.reason }) : null),
  readable && !(on && chosen.length === 1)
    ? el("button", { type: "button", className: "only", textContent: "only", title: "Show this run alone", "aria-label": `Show ${run.name} alone`,
      dataset: { key: `only ${run.name}` }, onclick: () => change({ runs: [run.name] }) }) : null);
}

/** A titled list of boxes; the choice goes to state[key]. ``mark`` gives a value its swatch, ``hint`` what is said when it is pointed at. */
export function drawChoice(key, title, values, chosen, { say = (v) => v, hint = say, mark = () => null } = {}) {
  const section = byId(key);
  section.hidden = !values.length;
  const set = (part) => change({ [key]: part });
  const all = (text, part) => el("button", { type: "button", textContent: text, dataset: { key: `${key} ${text}` }, onclick: () => set(part),
    "aria-label": `${title}: ${text}` });
  show(section, el("div", { className: "title" }, el("h2", { textContent: title }), all("all", [...values]), all("none", [])),
    el("ul", { className: "choice" }, ...values.map((v) => {
      const on = chosen.includes(v);
      const box = el("input", { type: "checkbox", dataset: { key: `${key} = ${v}`, on },
        onchange: (e) => set(values.filter((k) => (k === v ? e.target.checked : chosen.includes(k)))) });
      box.checked = on;
      return el("li", {}, el("label", { title: hint(v) || say(v) }, box, el("span", { className: "name", textContent: say(v) }), on ? mark(v) : null));
    })));
}

export const isChosen = (key, values, usual) => (state[key] === null ? usual : values.filter((v) => state[key].includes(v)));
