// The picture itself, one SVG for each namespace. Places come from layout.js, looks from tree.css.
// A selected bar fills the width together with its descendants.

import { count } from "../parts/format.js";
import { Component, html } from "../parts/html.js";
import { placeOf } from "./axis.js";
import { Below } from "./below.js";
import { Crumbs } from "./crumbs.js";
import { Badge, Bar, Lane, Rest } from "./pieces.js";
import { linesOf, Ruler, tearsOf } from "./ruler.js";

const [HEIGHT_LEAST, HEIGHT_MOST] = [380, 600]; // pixels that the rows share
const [ROW_LEAST, ROW_READABLE, ROW_MOST] = [6, 16, 40]; // pixels of each, whatever they share
const MARGIN_RIGHT = 48; // a lane's head and the number of what is left out stand here

export class Icicle extends Component {
  state = { width: 0, focused: null };

  componentDidMount() {
    this.observer = new ResizeObserver(([entry]) => {
      this.setState({ width: Math.floor(entry.contentRect.width) });
    });
    this.observer.observe(this.element.querySelector(".namespaces"));
  }

  /** Moves the focus as requested, and to a bar if the focused element was removed with the selection. */
  componentDidUpdate(before) {
    const { selected } = this.props;
    const isLost = before.selected !== selected && document.activeElement === document.body;
    if (!this.moveFocus && !isLost) return;
    const id = isLost ? selected ?? before.selected : this.state.focused;
    this.moveFocus = false;
    this.element.querySelector(`[data-node="${id}"]`)?.focus();
  }

  componentWillUnmount() {
    this.observer.disconnect();
  }

  render({ picture, path, found, beginnings, ages, selected, onSelect, onFold, clear }, { width }) {
    const x = scale(width - MARGIN_RIGHT, picture.axis);
    const row = rowHeight(picture.rows);
    const all = picture.namespaces.flatMap(({ bars }) => bars);
    const focused = all.find(({ node }) => node.id === this.state.focused) ?? all[0];
    const tears = tearsOf(x, picture.axis);
    const lines = linesOf(x, picture.axis, width);
    const looks = { x, row, lines, tears, found, beginnings, ages, selected, focused: focused?.node.id };
    return html`
      <div class="icicle" ref=${(element) => (this.element = element)}
           onKeyDown=${(event) => this.move(event, all)}>
        ${path.length > 0 && html`<${Crumbs} path=${path} onSelect=${onSelect} />`}
        <${Ruler} x=${x} axis=${picture.axis} lines=${lines} width=${width} />
        <${Below}>
          ${picture.namespaces.map((namespace) => html`
            <${Namespace} key=${namespace.id} namespace=${namespace} looks=${looks} width=${width}
                          isAlone=${picture.namespaces.length === 1} clear=${clear}
                          onSelect=${(id) => this.select(id)} onFold=${onFold} />`)}
        <//>
      </div>`;
  }

  select(id) {
    this.setState({ focused: id });
    this.props.onSelect(id);
  }

  /** Left to a bar's parent, right to its first child, up and down to the next bar. */
  move(event, bars) {
    const at = bars.findIndex(({ node }) => String(node.id) === event.target.dataset?.node);
    if (at < 0) return;
    const { node } = bars[at];
    const targets = {
      ArrowLeft: () => bars.find((bar) => bar.node.id === node.parent),
      ArrowRight: () => bars.find((bar) => bar.node.parent === node.id),
      ArrowDown: () => bars[at + 1],
      ArrowUp: () => bars[at - 1],
    };
    if (event.key === "Enter" || event.key === " ") this.select(node.id);
    else if (!(event.key in targets)) return;
    event.preventDefault();
    const target = targets[event.key]?.();
    if (!target) return;
    this.moveFocus = true;
    this.setState({ focused: target.node.id });
  }
}

function scale(width, axis) {
  const wide = Math.max(0, width) / axis.length;
  return (token) => Math.round(placeOf(axis, token) * wide * 100) / 100;
}

function rowHeight(rows) {
  const height = Math.min(HEIGHT_MOST, Math.max(HEIGHT_LEAST, rows * ROW_READABLE));
  return Math.min(ROW_MOST, Math.max(ROW_LEAST, Math.floor(height / rows)));
}

function Namespace({ namespace, looks, width, isAlone, onSelect, onFold, clear }) {
  const { bars, lanes, rests, rows, folded, name } = namespace;
  const height = rows * looks.row;
  const heading = html`<h3>${name} ${clear(namespace)}</h3>`;
  return html`
    <section class="namespace">
      ${!isAlone && heading}
      <svg role="group" aria-label="The tree of cached tokens" width=${width} height=${height}>
        <g class="lines" aria-hidden="true">
          ${looks.lines.map(({ token, at }) => html`
            <line key=${token} x1=${at} x2=${at} y1="0" y2=${height} />`)}
        </g>
        ${bars.map((bar) => html`
          <${Bar} key=${bar.node.id} bar=${bar} looks=${looks} onSelect=${onSelect} />`)}
        ${bars.map((bar) => html`<${Badge} key=${bar.node.id} bar=${bar} looks=${looks} />`)}
        ${lanes.map((lane) => html`
          <${Lane} key=${lane.request.id} lane=${lane} looks=${looks} />`)}
        ${rests.map((rest) => html`<${Rest} key=${rest.id} rest=${rest} looks=${looks} />`)}
      </svg>
      ${folded.prompts > 0 && html`
        <button class="quiet fold" aria-expanded="false" onClick=${onFold}>
          ${foldedText(folded)}</button>`}
    </section>`;
}

function foldedText({ prompts, tokens }) {
  const share = prompts === 1 ? "shares" : "share";
  return `+${prompts} that ${share} nothing: ${count(tokens, "token")}`;
}
