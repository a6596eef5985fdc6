// The parts of the picture: a bar is a run of tokens, a lane a request at the end of its path.

import { count, short, whole } from "../parts/format.js";
import { html } from "../parts/html.js";

const GAP = 2; // pixels between neighbours
const LETTER = 7; // about as wide as one, in pixels
const TEXT_HEIGHT = 13;
const TEXT_DEEPEST = 120; // pixels below the top of a high bar, of which one may see no more
const MARKED = 3; // so many of those that go next
const BADGE = 18; // room for the place among those evicted next
const HEAD = 7; // a lane's least width, so that it is seen when nearly all is stored
const TEAR = 6; // pixels that a tear is wide, and its pattern
const FOUND_LINE = 3;
const OLDEST_SECONDS = 1800; // from here on a bar is as faint as it gets
const [STRONGEST, FAINTEST] = [0.5, 0.12]; // opacity of what is cached

export function Bar({ bar, looks, onSelect }) {
  const { node } = bar;
  const begins = looks.beginnings.of(node);
  const box = boxOf(bar.from, bar.to, bar.row, bar.rows, looks);
  const isHeld = node.holders > 0;
  const use = isHeld ? "held" : "cached";
  const classes = [
    "bar", use, isMarked(node) && "next",
    looks.selected === node.id && "selected",
  ];
  const found = looks.found.get(node.id) ?? 0;
  const tears = looks.tears.filter((at) => at > box.x && at < box.x + box.width);
  const room = tears.length ? tears[0] - TEAR - box.x : box.width;
  return html`
    <g class=${classes.filter(Boolean).join(" ")} role="button" aria-label=${spoken(node, begins)}
       tabindex=${looks.focused === node.id ? 0 : -1} aria-pressed=${looks.selected === node.id}
       data-node=${node.id} data-tokens=${node.tokens} data-holders=${node.holders}
       onClick=${() => onSelect(node.id)}>
      ${begins && html`<title>${begins}</title>`}
      <rect class="body" ...${box} rx=${radius(box)}
            fill-opacity=${isHeld ? 1 : fading(looks.ages(node))} />
      ${node.disk_tokens > 0 && html`
        <rect class="disk" ...${boxOf(bar.from, bar.from + node.disk_tokens, bar.row, bar.rows, looks)}
              rx=${radius(box)} fill="url(#disk-${use})" />`}
      ${node.holes.map(([from, to]) => html`
        <rect class="hole" ...${boxOf(from, to, bar.row, bar.rows, looks)} fill="url(#hole)" />`)}
      ${node.states.map((token) => html`
        <path class="state" d=${diamond(looks.x(token) - GAP, box.y + box.height)} />`)}
      ${tears.map((at) => html`
        <rect key=${at} class="tear" x=${at - TEAR / 2} y=${box.y} width=${TEAR} height=${box.height}
              fill="url(#tear)" />`)}
      ${found > bar.from && html`
        <${Found} tokens=${found - bar.from}
                  box=${boxOf(bar.from, found, bar.row, bar.rows, looks)} />`}
      <${Label} text=${labelOf(node, begins, room)} box=${box} use=${use} />
    </g>`;
}

/** Its turn on a bar that is evicted soon. It is no part of the bar, whose name says it in words. */
export function Badge({ bar, looks }) {
  const box = boxOf(bar.from, bar.to, bar.row, bar.rows, looks);
  if (!isMarked(bar.node) || box.height < TEXT_HEIGHT || box.width < BADGE * 2) return null;
  const at = box.x + box.width - BADGE / 2 - 3;
  return html`
    <g class="badge" aria-hidden="true">
      <circle cx=${at} cy=${middle(box)} r="8" />
      <text x=${at} y=${middle(box)} text-anchor="middle">${bar.node.next_evicted}</text>
    </g>`;
}

/** An outline within the bar, with a line of the ground inside it, to be seen on every bar. */
function Found({ tokens, box }) {
  const inset = (by) => ({
    x: box.x + by, y: box.y + by,
    width: Math.max(1, box.width - 2 * by), height: Math.max(1, box.height - 2 * by),
  });
  const line = Math.min(FOUND_LINE, box.height / 4);
  return html`
    <g class="found" data-tokens=${tokens}>
      <rect class="within" ...${inset(line * 1.25)} stroke-width=${line / 2} rx=${radius(box)} />
      <rect class="outline" ...${inset(line / 2)} stroke-width=${line} rx=${radius(box)} />
    </g>`;
}

export function Lane({ lane, looks }) {
  const { request } = lane;
  const box = boxOf(lane.from, lane.to, lane.row, 1, looks);
  const done = Math.max(HEAD, looks.x(lane.computed) - looks.x(lane.from) - GAP);
  const rest = { ...box, x: box.x + 0.5, y: box.y + 0.5, width: Math.max(done, box.width) - 1 };
  const isRunning = request.state === "running";
  return html`
    <g class="lane ${request.state}" data-request=${request.id}>
      <title>${laneTitle(request)}</title>
      <rect class="ahead" ...${{ ...rest, height: Math.max(0, box.height - 1) }} rx=${radius(box)} />
      ${isRunning && html`<rect class="done" ...${box} width=${done} rx=${radius(box)} />`}
      <${Label} text=${laneLabel(request, box, done)} box=${{ ...box, width: done }}
                use=${request.state} />
    </g>`;
}

/** Nodes that the snapshot sums up, or queued requests that are only counted. They have no width of their own. */
export function Rest({ rest, looks }) {
  const box = boxOf(rest.from, rest.from, rest.row, 1, looks);
  const [title, text] = rest.queued
    ? [`${count(rest.queued, "more request")} queued`, `+${short(rest.queued)} queued`]
    : [`${count(rest.nodes, "more run")} of ${count(rest.tokens, "token")} in all`, `+${short(rest.nodes)}`];
  return html`
    <g class="rest">
      <title>${title}</title>
      <text x=${box.x + 4} y=${middle(box)}>${text}</text>
    </g>`;
}

/**
 * Stripes for what a window no longer has; thin lines, the other way, for what is on disk; a zigzag
 * where the axis is cut.
 */
export function Patterns() {
  return html`
    <svg class="patterns" width="0" height="0" aria-hidden="true">
      <pattern id="hole" width="6" height="6" patternUnits="userSpaceOnUse"
               patternTransform="rotate(45)">
        <rect class="stripe" width="3" height="6" />
      </pattern>
      <pattern id="tear" width=${TEAR} height="8" patternUnits="userSpaceOnUse">
        <path class="zigzag" d="M 1 -1 L 5 3 L 1 7 L 5 11" />
      </pattern>
      ${["held", "cached"].map((use) => html`
        <pattern key=${use} id="disk-${use}" width="7" height="7" patternUnits="userSpaceOnUse"
                 patternTransform="rotate(-45)">
          <rect class="hatch ${use}" width="1.2" height="7" />
        </pattern>`)}
    </svg>`;
}

/**
 * Its looks are its own and not of what it stands in: where that changes and moves at once, as it
 * does when a request begins, Chromium keeps the old ones.
 */
function Label({ text, box, use }) {
  if (!text || box.height < TEXT_HEIGHT) return null;
  return html`<text class="label ${use}" x=${box.x + 8} y=${middle(box)}>${text}</text>`;
}


function isMarked(node) {
  return node.next_evicted !== null && node.next_evicted <= MARKED;
}

function boxOf(from, to, row, rows, { x, row: rowHeight }) {
  const gap = rowHeight > 10 ? GAP : 1;
  return {
    x: x(from),
    y: row * rowHeight,
    width: Math.max(1, x(to) - x(from) - GAP),
    height: Math.max(1, rows * rowHeight - gap),
  };
}

/** Where text stands: in the middle, but not far down. */
function middle(box) {
  return box.y + Math.min(box.height / 2, TEXT_DEEPEST);
}

function radius(box) {
  return Math.min(4, box.height / 3, box.width / 3);
}

function diamond(x, bottom) {
  return `M ${x} ${bottom} l -4 -4 l 4 -4 l 4 4 Z`;
}

function fading(seconds) {
  const faded = Math.min(1, Math.log1p(seconds) / Math.log1p(OLDEST_SECONDS));
  return (STRONGEST - faded * (STRONGEST - FAINTEST)).toFixed(2);
}

/** The longest that fits. */
function fitting(texts, width) {
  return texts.find((text) => text.length * LETTER + 14 <= width) ?? "";
}

/** The accessible name contains each of these texts, so that speech input finds the bar by what it shows. */
function labelOf(node, begins, room) {
  const tokens = count(node.tokens, "token");
  const plain = [...(node.holders > 0 ? [`${tokens}, in use by ${node.holders}`] : []), tokens];
  const texts = begins ? [...plain.map((text) => `${begins}, ${text}`), begins, ...plain] : plain;
  return fitting([...texts, whole(node.tokens)], room - (isMarked(node) ? BADGE : 0));
}

function laneLabel(request, box, done) {
  if (request.state !== "running") return fitting([request.state], box.width);
  return request.output_tokens ? fitting([`+${request.output_tokens}`], done) : "";
}

function laneTitle(request) {
  const { state, prompt_tokens, cached_tokens, output_tokens } = request;
  const does = state === "loading" ? "loading from disk" : state;
  return `${does}: ${count(prompt_tokens, "token")} of prompt, ${whole(cached_tokens)} of them ` +
    `from the cache, ${whole(output_tokens)} generated`;
}

function spoken(node, begins) {
  const about = begins && `${begins}, `;
  const use = node.holders ? `in use by ${count(node.holders, "request")}` : "kept for later";
  const next = node.next_evicted ? `, place ${node.next_evicted} to be evicted` : "";
  const disk = node.disk_tokens ? `, ${whole(node.disk_tokens)} on disk` : "";
  return `${about}${count(node.tokens, "token")}, ${use}, from token ${whole(node.start)} on${disk}${next}`;
}
