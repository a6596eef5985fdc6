// A conversation with branches: messages are a tree, and one path through it is shown.

import { parts } from "./images.js";

/** Every message has `id`, `parent` (an id or null), `role`, `text`, and what its author notes. */
export class Conversation {
  constructor() {
    this.count = 0;
    this.messages = new Map();
    this.children = new Map([[null, []]]);
    this.chosen = new Map(); // of each parent, the child that is shown
  }

  /** A new message after `parent`, shown at once. */
  add(parent, role, text, notes = {}) {
    const message = { id: this.count++, parent, role, text, ...notes };
    this.messages.set(message.id, message);
    this.children.set(message.id, []);
    this.children.get(parent).push(message);
    this.chosen.set(parent, message.id);
    return message;
  }

  /** Remove a message if it is empty and no message follows it. */
  dropEmpty({ id, parent, text }) {
    if (text || this.children.get(id).length) return;
    this.messages.delete(id);
    this.children.delete(id);
    const rest = this.children.get(parent).filter((message) => message.id !== id);
    this.children.set(parent, rest);
    if (this.chosen.get(parent) === id) this.chosen.set(parent, rest.at(-1)?.id);
  }

  get(id) {
    return this.messages.get(id);
  }

  /** Show the branch that this message begins. */
  choose(message) {
    this.chosen.set(message.parent, message.id);
  }

  /** The messages that could stand in its place, itself among them. */
  siblings(message) {
    return this.children.get(message.parent);
  }

  /** What is shown, from the first message to the last. */
  path() {
    const shown = [];
    let id = this.chosen.get(null);
    while (id !== undefined) {
      shown.push(this.messages.get(id));
      id = this.chosen.get(id);
    }
    return shown;
  }

  /** The messages that lead to this one, and it, as the API wants them. */
  upTo(message, system) {
    const said = [];
    for (let id = message.id; id !== null; id = this.messages.get(id).parent) {
      said.unshift(asSent(this.messages.get(id)));
    }
    return system ? [{ role: "system", content: system }, ...said] : said;
  }
}

/** Calls that were cut off are left out: nobody has answered them. */
function asSent({ role, text, images, reasoning, calls, call, finish }) {
  if (role === "tool") return { role, tool_call_id: call.id, content: text };
  if (finish !== "tool_calls") return { role, content: images?.length ? parts(images, text) : text };
  return {
    role,
    content: text || null,
    reasoning_content: reasoning || undefined,
    tool_calls: calls.map(({ id, name, arguments: given }) =>
      ({ id, type: "function", function: { name, arguments: given } })),
  };
}
