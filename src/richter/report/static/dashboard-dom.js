// Elements, numbers and times. Names in a run are written by others: they reach the page as text only, never as markup.

/** An element with properties (attributes where they begin with aria- or are no property) and children; strings are text. */
export function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(properties)) {
    if (value === undefined) continue;
    if (key === "style") for (const [name, v] of Object.entries(value)) node.style.setProperty(name, v);
    else if (key === "dataset") Object.assign(node.dataset, value);
    else if (key in node) node[key] = value;
    else node.setAttribute(key, value);
  }
  node.append(...children.filter((c) => c !== null && c !== undefined));
  return node;
}

export const byId = (id) => document.getElementById(id);

const drawn = new WeakMap();

/** Put children into a parent only if they would look different, so that focus and scrolling stay where they are. */
export function show(parent, ...children) {
  const next = el("div", {}, ...children);
  const look = next.innerHTML;
  if (drawn.get(parent) === look) return;
  drawn.set(parent, look);
  const focused = parent.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  parent.replaceChildren(...next.childNodes);
  if (focused !== undefined) [...parent.querySelectorAll("[data-key]")].find((n) => n.dataset.key === focused)?.focus();
}

/** Empty a parent, also of what ``show`` remembers. */
export function clear(parent) {
  drawn.delete(parent);
  parent.replaceChildren();
}

export function number(v) {
  if (v === null || v === undefined || Number.isNaN(v)) return "–";
  const size = Math.abs(v);
  if (Number.isInteger(v) && size < 1e6) return String(v);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? v.toExponential(2) : v.toPrecision(4);
}

/** 0.8231 with error 0.012 is 0.823 ± 0.012. */
export function measured(value, error) {
  if (value === null || error === null || !(error > 0)) return number(value);
  const digits = Math.min(8, Math.max(0, 1 - Math.floor(Math.log10(error))));
  return `${value.toFixed(digits)} ± ${error.toFixed(digits)}`;
}

export function ago(seconds) {
  if (!(seconds >= 0)) return "";
  const [size, unit] = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]].find(([s]) => seconds >= s) ?? [1, "s"];
  return `${Math.floor(seconds / size)} ${unit} ago`;
}

let shared = ""; // beginning that the names of all layers share, up to a dot

/** Leave out of layer names what all of them begin with. */
export function nameLayers(layers) {
  const parents = layers.filter((k) => k !== "*" && k !== "").map((k) => k.split(".").slice(0, -1));
  const first = parents[0] ?? [];
  let same = parents.length > 1 ? first.length : 0;
  for (const parts of parents) while (same && parts.slice(0, same).join(".") !== first.slice(0, same).join(".")) same -= 1;
  shared = same ? `${first.slice(0, same).join(".")}.` : "";
}

export function layerName(layer) {
  if (layer === "*") return "whole model";
  if (layer.trim() === "") return "(root)";
  return shared && layer.startsWith(shared) ? layer.slice(shared.length) : layer;
}

/** A long name, with its middle left out. */
export const shortened = (name, most) => (name.length <= most ? name : `${name.slice(0, most / 2 - 1)}…${name.slice(name.length - most / 2)}`);

export function download(href, name) {
  el("a", { href, download: name }).click();
}
