// How the prompts of bars begin, for their labels. Only a daemon with --dashboard-text has them.

import { ask } from "../net/api.js";

const MOST = 32; // nodes of one request, which the daemon allows
const EVERY_MS = 1000;
const KEPT = 2000; // texts
const CHARACTERS = 40;
const MARKER = /<\|?[^<>\s]{1,40}>/g; // a control token, such as <|im_start|>

export class Beginnings {
  texts = new Map(); // by place
  askedAt = -Infinity;
  isOff = false; // the daemon shows no text

  constructor(model, onChange) {
    this.model = model;
    this.onChange = onChange;
  }

  /** The first words of a node's text, in quotes; nothing before they are known. */
  of(node) {
    return this.texts.get(place(node)) ?? "";
  }

  /** Read the first words of these nodes, the most important ones first, at most every EVERY_MS. */
  async read(nodes) {
    const unknown = nodes.filter((node) => !this.texts.has(place(node))).slice(0, MOST);
    const now = performance.now();
    if (this.isOff || unknown.length === 0 || now < this.askedAt + EVERY_MS) return;
    this.askedAt = now;
    if (this.texts.size > KEPT) this.texts.clear();
    const ids = unknown.map(({ id }) => ["ids", id]);
    const query = new URLSearchParams([["model", this.model], ...ids]);
    const answer = await ask(`admin/cache/nodes?${query}`)
      .then((response) => response.json()).catch(() => null);
    if (answer === null) return;
    this.isOff = !answer.shows_text;
    for (const node of unknown) this.texts.set(place(node), quoted(answer.beginnings[node.id] ?? ""));
    if (!this.isOff) this.onChange();
  }
}

/** A node that is split keeps its id, and may begin elsewhere then. */
function place({ id, start }) {
  return `${id} ${start}`;
}

function quoted(text) {
  const words = text.replaceAll(MARKER, " ").replaceAll(/\s+/g, " ").trim();
  const short = words.length > CHARACTERS ? `${words.slice(0, CHARACTERS).replace(/\s\S*$/, "")} …` : words;
  return short && `“${short}”`;
}
