// The picture itself, one SVG for each namespace. Places come from layout.js, looks from tree.css.
// A bar that is selected fills the width with all that is behind it.

import { whole } from "../parts/format.js";
import { Component, html } from "../parts/html.js";
import { Crumbs } from "./crumbs.js";
import { Bar, Lane, Rest } from "./pieces.js";
import { ticks } from "./layout.js";

const [HEIGHT_LEAST, HEIGHT_MOST] = [380, 600]; // pixels that the rows share
const [ROW_LEAST, ROW_READABLE, ROW_MOST] = [5, 16, 40]; // pixels of each, whatever they share
const PIXELS_BETWEEN_TICKS = 90;
const MARGIN_RIGHT = 48; // a lane's head and the number of what is left out stand here
const MARGIN_TICK = 24; // closer to the left edge a tick's number begins at its line
const MOST_SMOOTH = 400; // more bars than that move without a transition

export class Icicle extends Component {
  state = { width: 0, focused: null };

  componentDidMount() {
    this.observer = new ResizeObserver(([entry]) => {
      this.setState({ width: Math.floor(entry.contentRect.width) });
    });
    this.observer.observe(this.element);
  }

  /** Focus goes where it was sent; and to a bar when what had it has gone with the selection. */
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

  render({ picture, path, lit, ages, selected, onSelect, clear }, { width }) {
    const x = scale(width - MARGIN_RIGHT, picture);
    const row = rowHeight(picture.rows);
    const all = picture.namespaces.flatMap(({ bars }) => bars);
    const focused = all.find(({ node }) => node.id === this.state.focused) ?? all[0];
    const looks = { x, row, lit, ages, selected, focused: focused?.node.id };
    const isSmooth = all.length <= MOST_SMOOTH;
    return html`
      <div class="icicle ${isSmooth ? "smooth" : ""}" ref=${(element) => (this.element = element)}
           onKeyDown=${(event) => this.move(event, all)}>
        ${path.length > 0 && html`<${Crumbs} path=${path} onSelect=${onSelect} />`}
        <${Axis} x=${x} picture=${picture} width=${width} />
        <div class="namespaces">
          ${picture.namespaces.map((namespace) => html`
            <${Namespace} key=${namespace.id} namespace=${namespace} looks=${looks} width=${width}
                          isAlone=${picture.namespaces.length === 1} picture=${picture}
                          onSelect=${(id) => this.select(id)} clear=${clear} />`)}
        </div>
      </div>`;
  }

  select(id) {
    this.setState({ focused: id });
    this.props.onSelect(id);
  }

  /** Left to what a bar stands behind, right to what stands behind it, up and down to the next. */
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

function scale(width, { from, to }) {
  const wide = Math.max(0, width) / (to - from);
  return (token) => Math.round((token - from) * wide * 100) / 100;
}

function rowHeight(rows) {
  const height = Math.min(HEIGHT_MOST, Math.max(HEIGHT_LEAST, rows * ROW_READABLE));
  return Math.min(ROW_MOST, Math.max(ROW_LEAST, Math.floor(height / rows)));
}

function lines(x, picture, width) {
  return ticks(picture, Math.max(2, Math.floor(width / PIXELS_BETWEEN_TICKS))).map((token) => ({
    token, at: Math.round(x(token)) + 0.5,
  }));
}

function Axis({ x, picture, width }) {
  return html`
    <svg class="axis" width=${width} height="20" aria-hidden="true">
      ${lines(x, picture, width).map(({ token, at }) => html`
        <text key=${token} x=${at} y="14" text-anchor=${at < MARGIN_TICK ? "start" : "middle"}>
          ${token === 0 ? "token 0" : whole(token)}
        </text>`)}
    </svg>`;
}

function Namespace({ namespace, looks, width, picture, isAlone, onSelect, clear }) {
  const { bars, lanes, rests, rows, name } = namespace;
  const height = rows * looks.row;
  const heading = html`<h3>${name} ${clear(namespace)}</h3>`;
  return html`
    <section class="namespace">
      ${!isAlone && heading}
      <svg role="group" aria-label="The tree of cached tokens" width=${width} height=${height}>
        <g class="lines" aria-hidden="true">
          ${lines(looks.x, picture, width).map(({ token, at }) => html`
            <line key=${token} x1=${at} x2=${at} y1="0" y2=${height} />`)}
        </g>
        ${bars.map((bar) => html`
          <${Bar} key=${bar.node.id} bar=${bar} looks=${looks} onSelect=${onSelect} />`)}
        ${lanes.map((lane) => html`
          <${Lane} key=${lane.request.id} lane=${lane} looks=${looks} />`)}
        ${rests.map((rest) => html`<${Rest} key=${rest.id} rest=${rest} looks=${looks} />`)}
      </svg>
    </section>`;
}
