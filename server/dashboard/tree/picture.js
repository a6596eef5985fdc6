// The tree with all that belongs to it: heading, legend, the selected bar, the tables.

import { count } from "../parts/format.js";
import { Component, html } from "../parts/html.js";
import { Details } from "./details.js";
import { Empty } from "./empty.js";
import { Icicle } from "./icicle.js";
import { layout } from "./layout.js";
import { Legend } from "./legend.js";
import { Patterns } from "./pieces.js";
import { Tables } from "./table.js";

export class Picture extends Component {
  state = { selected: null };

  render({ snapshot, lit, seconds, clear }, { selected }) {
    const picture = layout(snapshot);
    const isEmpty = picture.rows === 0;
    const ages = (node) => node.idle_seconds + seconds;
    return html`
      <section class="picture" aria-labelledby="picture">
        <header>
          <h2 id="picture">The cache</h2>
          ${!isEmpty && clear(null)}
        </header>
        <p class="muted">A bar is a run of tokens, as wide as it is long. Prompts that begin alike share
          their first bars; where they part, they fan out to the right.</p>
        <${Patterns} />
        ${isEmpty ? html`<${Empty} />` : html`
          <${Icicle} picture=${picture} lit=${lit} ages=${ages} selected=${selected} clear=${clear}
                     onSelect=${(id) => this.select(id)} />`}
        ${snapshot.hidden.nodes > 0 && html`
          <p class="muted">and ${count(snapshot.hidden.nodes, "smaller run")} of
            ${count(snapshot.hidden.tokens, "token")}, not drawn</p>`}
        ${!isEmpty && html`<${Legend} groups=${snapshot.groups} />`}
        ${selected !== null && this.details(snapshot, selected, ages, clear)}
        <${Tables} snapshot=${snapshot} ages=${ages} />
      </section>`;
  }

  details(snapshot, selected, ages, clear) {
    const nodes = new Map(snapshot.nodes.map((node) => [node.id, node]));
    const node = nodes.get(selected);
    const namespace = node && snapshot.namespaces.find(({ id }) => id === node.namespace);
    const users = snapshot.requests.filter((request) => isOnPath(nodes, request.node, selected));
    return html`
      <${Details} id=${selected} node=${node} namespace=${namespace} idle=${node && ages(node)}
                  users=${users} clear=${clear} onClose=${() => this.select(selected)} />`;
  }

  /** A second time is a farewell. */
  select(id) {
    this.setState(({ selected }) => ({ selected: selected === id ? null : id }));
  }
}

/** Whether the path that ends at `from` goes through `id`. */
function isOnPath(nodes, from, id) {
  while (from !== null && from !== id) from = nodes.get(from)?.parent ?? null;
  return from === id;
}
