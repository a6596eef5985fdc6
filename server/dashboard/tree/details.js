// The facts of one bar in words, and its text if the daemon shows texts.

import { ask, reason } from "../net/api.js";
import { age, count, whole } from "../parts/format.js";
import { Component, html } from "../parts/html.js";

export class Details extends Component {
  state = { text: null, problem: null };

  componentDidMount() {
    this.read();
  }

  componentDidUpdate(before) {
    if (before.id !== this.props.id) this.read();
  }

  render({ node, namespace, idle, users, hasDisk, clear, onClose }) {
    return html`
      <section class="details" aria-label="The selected run of tokens">
        <header>
          <h3>${node ? title(node) : "No longer in the cache"}</h3>
          <button class="quiet" onClick=${onClose} aria-label="Close the details">✕</button>
        </header>
        ${node
          ? html`<${Facts} node=${node} namespace=${namespace} idle=${idle} users=${users}
                           hasDisk=${hasDisk} />
                 <${Text} ...${this.state} />
                 <div class="actions">${clear(namespace)}</div>`
          : html`<p class="muted">It was evicted, cleared, or split where a new prompt branches
                 off.</p>`}
      </section>`;
  }

  async read() {
    const { id, model } = this.props;
    this.setState({ text: null, problem: null });
    try {
      const query = new URLSearchParams({ model });
      const answer = await (await ask(`admin/cache/nodes/${id}?${query}`)).json();
      if (id === this.props.id) this.setState({ text: answer.text });
    } catch (error) {
      if (id === this.props.id) this.setState({ problem: reason(error) });
    }
  }
}

function title(node) {
  return `Tokens ${whole(node.start)} to ${whole(node.start + node.tokens)}`;
}

function Facts({ node, namespace, idle, users, hasDisk }) {
  const facts = [
    ["Length", `${count(node.tokens, "token")} in ${count(node.blocks, "block")}`],
    ["In use by", node.holders ? count(node.holders, "request") : "nobody; kept for later"],
    ["Last used", node.holders ? "in use" : age(idle)],
    ["Namespace", namespace.name],
  ];
  if (hasDisk) facts.push(["On disk", onDisk(node)]);
  if (users.length) facts.push(["Requests", users.map((user) => user.id).join(", ")]);
  if (node.states.length) facts.push(["States at", node.states.map(whole).join(", ")]);
  if (node.next_evicted) facts.push(["Eviction", `number ${node.next_evicted} in line`]);
  return html`
    <dl>${facts.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}
    </dl>`;
}

function onDisk({ tokens, disk_tokens }) {
  if (disk_tokens === 0) return "nothing of it";
  return disk_tokens === tokens ? "all of it" : `its first ${count(disk_tokens, "token")}`;
}

function Text({ text, problem }) {
  if (text !== null) {
    return html`<pre class="node-text" tabindex="0" aria-label="The text of these tokens">${text}</pre>`;
  }
  return html`<p class="muted">${problem ??
    "Start the daemon with --dashboard-text to read the text of these tokens here."}</p>`;
}
