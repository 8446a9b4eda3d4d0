// A table of settings, runs side by side; rows that differ come first and are marked.

import { ask } from "./dashboard-api.js";
import { el, show } from "./dashboard-dom.js";

const PARTS = [["Settings", "settings"], ["Seeds", "seeds"], ["Where and when it ran", "where"]];

export async function draw(view, { runs }, current) {
  const { runs: details } = await ask("settings", { run: runs });
  const bare = details.filter((d) => !Object.keys(d.settings).length).map((d) => d.run);
  if (current()) show(view, ...without(bare), ...PARTS.flatMap(([title, part]) => table(title, part, details)));
}

/** Runs without settings are not the same: nothing is known of how they differ. */
const without = (runs) => (runs.length ? [el("article", { className: "card" }, el("h3", { textContent: "Without settings" }),
  el("p", { textContent: `${runs.join(", ")}: no settings were recorded, so nothing is known of what differs. Observer(..., run=..., settings=...) keeps them.` }))] : []);

function table(title, part, details) {
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
}
