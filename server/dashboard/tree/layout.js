// The places of a snapshot's parts: tokens along x, rows along y. No pixels and no drawing.

import { axisOf, rounded } from "./axis.js";
import { folding } from "./fold.js";
import { childrenOf, itemsAfter, rootOf } from "./order.js";

/**
 * The picture of all nodes, or of the node `top` and its descendants: its axis, its rows, and for
 * each namespace its bars (a node from token `from` to `to`, as many rows high as its descendants
 * take), lanes (the tokens of a request beyond its node), rests (nodes that the snapshot leaves out,
 * and queued requests that are only counted), and what is `folded`: prompts that share nothing, all
 * but the `mostAlone` longest.
 */
export function layout(snapshot, { top = null, mostAlone }) {
  const children = childrenOf(snapshot);
  const namespaces = snapshot.namespaces
    .filter(({ id }) => top === null || top.namespace === id)
    .map((namespace) => ({ ...namespace, ...placed(children, namespace.id, top, mostAlone) }))
    .filter((namespace) => namespace.rows > 0);
  const pieces = namespaces.flatMap(({ bars, lanes }) => [...bars, ...lanes]);
  const stops = namespaces.flatMap((namespace) => namespace.stops);
  const axis = axisOf(top?.start ?? 0, stops, median(pieces.map(({ from, to }) => to - from)));
  const rows = namespaces.reduce((sum, namespace) => sum + namespace.rows, 0);
  return { axis: top === null ? rounded(axis) : axis, rows, namespaces };
}

function placed(children, namespace, top, mostAlone) {
  const all = top === null ? itemsAfter(children, rootOf(namespace)) : [{ node: top }];
  const { items, folded } = folding(children, all, mostAlone);
  return { ...rowsOf(children, items), folded };
}

/** Depth first, without recursion: an agent's conversation may be thousands of nodes long. */
function rowsOf(children, items) {
  const [bars, lanes, rests, stops] = [[], [], [], []];
  const open = [{ bar: null, items, next: 0 }];
  let rows = 0;
  while (open.length) {
    const level = open.at(-1);
    const { bar } = level;
    if (level.next === level.items.length) {
      open.pop();
      if (bar === null) continue;
      rows = Math.max(rows, bar.row + 1);
      bar.rows = rows - bar.row;
      continue;
    }
    const { node, request, queued, hidden } = level.items[level.next];
    level.next += 1;
    if (node) {
      const child = { node, from: node.start, to: node.start + node.tokens, row: rows, rows: 1 };
      bars.push(child);
      const inner = itemsAfter(children, node.id);
      open.push({ bar: child, items: inner, next: 0 });
      stops.push(child.from, ...(grows(inner) ? [] : [child.to]));
      continue;
    }
    if (request) lanes.push(lane(request, bar, rows));
    else rests.push({ ...hidden, queued, id: `${bar?.node.id} ${queued}`, from: bar?.to ?? 0, row: rows });
    rows += 1;
  }
  return { bars, lanes, rests, rows, stops: [...stops, ...lanes.map(({ to }) => to)] };
}

/** Whether a node with these items is the end of running prompts alone. Its end moves with them, and would move the axis. */
function grows(items) {
  return items.length > 0 && items.every(({ request, queued }) => request || queued);
}

/**
 * The computed tokens of a request beyond its node, and then those that are still to be computed. It
 * begins within the bar if the request has computed less than the node has.
 */
function lane(request, bar, row) {
  const from = Math.min(bar?.to ?? 0, request.computed_tokens);
  const computed = Math.max(from, request.computed_tokens);
  const to = Math.max(computed, request.prompt_tokens + request.output_tokens);
  return { request, from, computed, to, row };
}

function median(numbers) {
  const sorted = [...numbers].sort((one, two) => one - two);
  return Math.max(1, sorted[sorted.length >> 1] ?? 1);
}
