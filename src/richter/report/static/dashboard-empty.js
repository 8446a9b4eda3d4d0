// What the page says where there is nothing to draw.

import { el } from "./dashboard-dom.js";

export function emptyStore(store) {
  return el("article", { className: "card empty" },
    el("h3", { textContent: "No runs yet" }),
    el("p", {}, "Runs written below ", el("code", { textContent: store }), " appear here by themselves, while they train. In your training script:"),
    el("pre", { textContent: `import richter\n\nprobe = richter.Probe(x[:256], y[:256])\nwatch = richter.Observer(model, probe, run=${JSON.stringify(`${store}/first`)})\n\nfor step, (xb, yb) in enumerate(loader):\n    loss = train_step(model, xb, yb)\n    watch(step, loss=loss)` }));
}

export const message = (text) => el("article", { className: "card empty" }, el("p", { textContent: text }));
