// What is shown, kept in the address after #, so that a view can be shared. A choice nobody has made is null and stays out.

const LISTS = { runs: "run", measures: "measure", layers: "layer", scalars: "scalar", logy: "logy", arrays: "array" };
const WORDS = { view: "view", layer: "of", from: "from", sort: "sort", value: "value", against: "against" };

export const state = read();

const listeners = [];
export const onChange = (listener) => listeners.push(listener);

export function change(part) {
  note(part);
  for (const listener of listeners) listener();
}

/** A change that is shown already. */
export function note(part) {
  Object.assign(state, part);
  const hash = written(state);
  if (hash !== location.hash) history.replaceState(null, "", hash || location.pathname + location.search);
}

addEventListener("hashchange", () => change(read()));

function read() {
  const words = new URLSearchParams(location.hash.slice(1));
  const choices = { view: null, logx: !words.has("linx"), x: null, step: null, layer: null, from: null, sort: null, value: null, against: null };
  for (const [key, word] of Object.entries(LISTS)) {
    // "measure=" alone: none of them was chosen on purpose
    choices[key] = words.has(word) ? words.getAll(word).filter((w) => w !== "" || word === "layer") : null;
    if (words.has(`no-${word}`)) choices[key] = [];
  }
  for (const [key, word] of Object.entries(WORDS)) if (words.has(word)) choices[key] = words.get(word);
  const ends = (words.get("x") ?? "").split("~").map(Number);
  if (ends.length === 2 && ends.every(Number.isFinite) && ends[0] < ends[1]) choices.x = ends;
  if (/^\d+$/.test(words.get("step") ?? "")) choices.step = Number(words.get("step"));
  return choices;
}

function written(s) {
  const words = new URLSearchParams();
  for (const [key, word] of Object.entries(LISTS)) {
    if (s[key]?.length === 0) words.append(`no-${word}`, "");
    for (const v of s[key] ?? []) words.append(word, v);
  }
  for (const [key, word] of Object.entries(WORDS)) if (s[key] !== null) words.append(word, s[key]);
  if (!s.logx) words.append("linx", "");
  if (s.x) words.append("x", s.x.map((v) => Number(v.toPrecision(6))).join("~"));
  if (s.step !== null) words.append("step", s.step);
  const text = words.toString().replace(/=(?=&|$)/g, "");
  return text && `#${text}`;
}
