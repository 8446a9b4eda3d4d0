// Questions to the server. What it answered before is kept with its ETag, so that asking again costs next to nothing.

const known = new Map();
const MOST = 300;

export class Refused extends Error {
  constructor(status, sentence) {
    super(sentence);
    this.status = status;
  }
}

export function address(path, query = {}) {
  const words = new URLSearchParams();
  for (const [key, value] of Object.entries(query)) for (const v of [value].flat()) words.append(key, v);
  return words.size ? `api/${path}?${words}` : `api/${path}`;
}

/** The answer; the same object as before if nothing has changed. */
export async function ask(path, query = {}) {
  const url = address(path, query);
  const before = known.get(url);
  const reply = await fetch(url, { cache: "no-store", headers: before ? { "If-None-Match": before.tag } : {} });
  if (reply.status === 304) return before.answer;
  if (!reply.ok) throw new Refused(reply.status, await sentence(reply));
  const answer = await reply.json();
  known.delete(url);
  known.set(url, { tag: reply.headers.get("ETag"), answer });
  if (known.size > MOST) known.delete(known.keys().next().value);
  return answer;
}

async function sentence(reply) {
  const text = await reply.text();
  try {
    return JSON.parse(text).error;
  } catch {
    return text || `The server answered ${reply.status}.`;
  }
}
