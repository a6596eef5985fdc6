// The tree with all that belongs to it: heading, legend, the selected bar, the tables.

import { count } from "../parts/format.js";
import { Component, html } from "../parts/html.js";
import { Beginnings } from "./beginnings.js";
import { Details } from "./details.js";
import { Empty } from "./empty.js";
import { foundIn } from "./found.js";
import { Icicle } from "./icicle.js";
import { layout } from "./layout.js";
import { Legend } from "./legend.js";
import { Patterns } from "./pieces.js";
import { Tables } from "./table.js";

const MOST_ALONE = 5; // prompts that share nothing: more of them are folded
const SHORT_SHARE = 0.1; // of all blocks: if fewer are free, the bars that are evicted next are marked

export class Picture extends Component {
  state = { selected: null, mostAlone: MOST_ALONE };
  beginnings = new Beginnings(this.props.snapshot.model, () => this.forceUpdate());

  componentDidUpdate() {
    if (this.props.isPast) return;
    const bars = this.picture.namespaces.flatMap((namespace) => namespace.bars);
    const area = ({ rows, from, to }) => rows * (to - from);
    this.beginnings.read(bars.sort((one, other) => area(other) - area(one)).map(({ node }) => node));
  }

  render({ isPast, seconds, question, named, clear, ...props }, { selected, mostAlone }) {
    const isShort = isMemoryShort(props.snapshot);
    const snapshot = isShort ? props.snapshot : withoutTurns(props.snapshot);
    const nodes = new Map(snapshot.nodes.map((node) => [node.id, node]));
    const path = pathTo(nodes, selected);
    const picture = layout(snapshot, { top: path.at(-1) ?? null, mostAlone });
    this.picture = picture;
    const isEmpty = picture.rows === 0;
    const { disk, groups, hidden } = snapshot;
    const ages = (node) => node.idle_seconds + seconds;
    return html`
      <section class="picture ${isPast ? "past" : ""}" aria-labelledby="picture" onKeyDown=${(event) => this.leave(event)}>
        <header>
          <h2 id="picture">The cache</h2>
          ${clear(null)}
        </header>
        <p class="muted">A bar is a run of tokens, as wide as it is long${
          picture.axis.cuts.length > 0 && "; under a zigzag it is cut short"}. Prompts that begin alike share their first bars; where they part, they fan out to the right.</p>
        <${Patterns} />
        ${isEmpty ? html`<${Empty} disk=${disk} question=${question} named=${named} />` : html`
          <${Icicle} picture=${picture} path=${path} found=${foundIn(snapshot, seconds)} beginnings=${this.beginnings}
                     ages=${ages} selected=${selected} clear=${clear}
                     onSelect=${(id) => this.select(id)}
                     onFold=${() => this.setState({ mostAlone: Infinity })} />`}
        ${mostAlone === Infinity && html`
          <button class="quiet fold" aria-expanded="true"
                  onClick=${() => this.setState({ mostAlone: MOST_ALONE })}>
            Fold prompts that share nothing</button>`}
        ${hidden.nodes > 0 && html`
          <p class="muted">and ${count(hidden.nodes, "smaller run")} of
            ${count(hidden.tokens, "token")}, not drawn</p>`}
        ${!isEmpty && html`<${Legend} groups=${groups} disk=${disk} isShort=${isShort} />`}
        ${selected !== null && this.details(snapshot, nodes, ages, clear)}
        <${Tables} snapshot=${snapshot} ages=${ages} />
      </section>`;
  }

  details(snapshot, nodes, ages, clear) {
    const { selected } = this.state;
    const node = nodes.get(selected);
    const namespace = node && snapshot.namespaces.find(({ id }) => id === node.namespace);
    const users = snapshot.requests.filter((request) =>
      pathTo(nodes, request.node).some(({ id }) => id === selected));
    return html`
      <${Details} id=${selected} model=${snapshot.model} node=${node} namespace=${namespace} idle=${node && ages(node)}
                  users=${users} hasDisk=${snapshot.disk !== null} clear=${clear}
                  onClose=${() => this.select(null)} />`;
  }

  /** A second click on the selected bar ends the selection. */
  select(id) {
    this.setState(({ selected }) => ({ selected: selected === id ? null : id }));
  }

  leave(event) {
    if (event.key === "Escape") this.select(null);
  }
}

function isMemoryShort({ arena: { free, blocks } }) {
  return free < SHORT_SHARE * blocks;
}

/** The snapshot with no node next to be evicted: while enough blocks are free, none is. */
function withoutTurns(snapshot) {
  return { ...snapshot, nodes: snapshot.nodes.map((node) => ({ ...node, next_evicted: null })) };
}

/** The nodes from the first to the one with that id; none where it is not shown. */
function pathTo(nodes, id) {
  const path = [];
  for (let node = nodes.get(id); node; node = nodes.get(node.parent)) path.push(node);
  return path.reverse();
}
