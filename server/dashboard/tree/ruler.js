// The axis above the picture: numbers where it is to scale, a zigzag where it is cut.

import { whole } from "../parts/format.js";
import { html } from "../parts/html.js";
import { ticks } from "./axis.js";

const PIXELS_BETWEEN_TICKS = 90;
const MARGIN_TICK = 24; // closer to the left edge a tick's number begins at its line
const [LETTER, MARGIN_CUT] = [6, 60]; // pixels of a letter, and of the numbers beside a cut
const [LEAST_TORN, FROM_END, GRID] = [20, 14, 6]; // pixels: a cut's width, a tear's place, its pattern
const ZIGZAG = 4;

/** { token, at }: where lines stand, in pixels. */
export function linesOf(x, axis, width) {
  return ticks(axis, Math.max(2, Math.floor(width / PIXELS_BETWEEN_TICKS))).map((token) => ({
    token, at: Math.round(x(token)) + 0.5,
  }));
}

/** Where bars are torn, in pixels: near the end of each cut, where a bar's text seldom is. */
export function tearsOf(x, { cuts }) {
  return cuts
    .filter(({ from, to }) => x(to) - x(from) >= LEAST_TORN)
    .map(({ to }) => Math.floor((x(to) - FROM_END) / GRID) * GRID + GRID / 2);
}

export function Ruler({ x, axis, lines, width }) {
  return html`
    <svg class="axis" width=${width} height="24" aria-hidden="true">
      ${lines.map(({ token, at }) => html`
        <text key=${token} x=${at} y="14" text-anchor=${at < MARGIN_TICK ? "start" : "middle"}>
          ${token === 0 ? "token 0" : whole(token)}
        </text>`)}
      ${axis.cuts.map(({ from, to }) => html`
        <g key=${to} class="cut">
          <path d=${zigzag(x(from), x(to))} />
          <text x=${(x(from) + x(to)) / 2} y="14" text-anchor="middle">
            ${cutText(to - from, x(to) - x(from))}</text>
        </g>`)}
    </svg>`;
}

/** The longest that fits. */
function cutText(tokens, width) {
  const texts = [`${whole(tokens)} tokens, not to scale`, "not to scale", "cut"];
  return texts.find((text) => text.length * LETTER + MARGIN_CUT <= width) ?? "";
}

function zigzag(from, to) {
  const teeth = Math.max(1, Math.floor((to - from - 2) / (2 * ZIGZAG)));
  return `M ${from} 23 ${`l ${ZIGZAG} -${ZIGZAG} l ${ZIGZAG} ${ZIGZAG} `.repeat(teeth)}`;
}
