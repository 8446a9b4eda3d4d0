// Colours that people with any colour vision can tell apart (Okabe and Ito; for many layers a scale along depth), by theme.

const dark = matchMedia("(prefers-color-scheme: dark)");
const FEW = {
  light: ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#222222"],
  dark: ["#4FA8E0", "#E69F00", "#1FC29A", "#DE92BD", "#9AD4F5", "#F07B3A", "#E8E8E8"],
};
const DEPTH = {
  light: ["#3B0F70", "#31688E", "#1F9E89", "#6CBF45", "#C9BB1A"],
  dark: ["#9C7BE8", "#5AA7E6", "#35C9B1", "#8FDD6C", "#F3E55B"],
};
const DASHES = { solid: "", dash: "6 4", dot: "2 3", dashdot: "6 3 2 3", longdash: "10 3", longdashdot: "10 3 2 3" };

export const theme = () => (dark.matches ? "dark" : "light");
export const onTheme = (listener) => dark.addEventListener("change", listener);

export function ink(which = theme()) {
  return which === "dark"
    ? { text: "#c9ced6", faint: "#8b939f", grid: "#2a3038", line: "#3c444e", zero: "#1b1f25", paper: "#1b1f25" }
    : { text: "#333a42", faint: "#6a737d", grid: "#eceef0", line: "#d5d9dd", zero: "#ffffff", paper: "#ffffff" };
}

/** The i-th of n colours. */
export function colour(i, n, which = theme()) {
  if (n <= FEW[which].length) return FEW[which][i];
  const at = (i / Math.max(1, n - 1)) * (DEPTH[which].length - 1);
  const k = Math.min(DEPTH[which].length - 2, Math.floor(at));
  return mixed(DEPTH[which][k], DEPTH[which][k + 1], at - k);
}

/** How a curve is drawn. One run: a colour for each layer. Several: a colour for each run, and a dash for each layer. */
export function looks(runs, layers, which = theme()) {
  const inner = layers.filter((k) => k !== "*");
  return (run, layer) => {
    const dash = Object.keys(DASHES)[Math.max(0, layers.indexOf(layer)) % 6];
    if (runs.length > 1) return { color: colour(Math.max(0, runs.indexOf(run)), runs.length, which), dash };
    const i = inner.indexOf(layer);
    return { color: i < 0 ? ink(which).text : colour(i, inner.length, which), dash: "solid" };
  };
}

/** A short piece of the line that a curve is drawn with. */
export function swatch({ color, dash }) {
  const part = (tag, attributes) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    return node;
  };
  const picture = part("svg", { class: "swatch", width: 24, height: 8, "aria-hidden": "true" });
  picture.append(part("line", { x1: 0, x2: 24, y1: 4, y2: 4, stroke: color, "stroke-width": 2.5, "stroke-dasharray": DASHES[dash] }));
  return picture;
}

/** The colour of a number between 0 and 1, dark to light (viridis), the same in both themes. */
export function shade(t) {
  const stops = ["#440154", "#3b528b", "#21918c", "#5ec962", "#fde725"];
  const k = Math.min(stops.length - 2, Math.floor(t * (stops.length - 1)));
  return mixed(stops[k], stops[k + 1], t * (stops.length - 1) - k);
}

function mixed(a, b, t) {
  const parts = (c) => [1, 3, 5].map((i) => parseInt(c.slice(i, i + 2), 16));
  const [from, to] = [parts(a), parts(b)];
  return `#${from.map((v, i) => Math.round(v + (to[i] - v) * t).toString(16).padStart(2, "0")).join("")}`;
}
