// A conversation with branches: messages are a tree, and one path through it is shown.

/** Every message has `id`, `parent` (an id or null), `role`, `text`, and what its author notes. */
export class Conversation {
  constructor() {
    this.messages = new Map();
    this.children = new Map([[null, []]]);
    this.chosen = new Map(); // of each parent, the child that is shown
  }

  /** A new message behind `parent`, shown at once. */
  add(parent, role, text, notes = {}) {
    const message = { id: this.messages.size, parent, role, text, ...notes };
    this.messages.set(message.id, message);
    this.children.set(message.id, []);
    this.children.get(parent).push(message);
    this.chosen.set(parent, message.id);
    return message;
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
      const { role, text } = this.messages.get(id);
      said.unshift({ role, content: text });
    }
    return system ? [{ role: "system", content: system }, ...said] : said;
  }
}
