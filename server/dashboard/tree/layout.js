// From a snapshot to places: tokens along x, rows along y. No pixels and no drawing.

import { axisOf, rounded } from "./axis.js";
import { folding } from "./fold.js";
import { behindOf, itemsBehind, rootOf } from "./order.js";

/**
 * The picture of all there is, or of the node `top` with all behind it: its axis, its rows, and for
 * each namespace its bars (a node from token `from` to `to`, as many rows high as all that fans out
 * after it), lanes (the tokens of a request beyond its node), rests (nodes that the snapshot leaves
 * out, and queued requests that are only counted), and what is folded: prompts that share nothing, all but the `mostAlone` longest.
 */
export function layout(snapshot, { top = null, mostAlone }) {
  const behind = behindOf(snapshot);
  const namespaces = snapshot.namespaces
    .filter(({ id }) => top === null || top.namespace === id)
    .map((namespace) => ({ ...namespace, ...placed(behind, namespace.id, top, mostAlone) }))
    .filter((namespace) => namespace.rows > 0);
  const pieces = namespaces.flatMap(({ bars, lanes }) => [...bars, ...lanes]);
  const stops = namespaces.flatMap((namespace) => namespace.stops);
  const axis = axisOf(top?.start ?? 0, stops, median(pieces.map(({ from, to }) => to - from)));
  const rows = namespaces.reduce((sum, namespace) => sum + namespace.rows, 0);
  return { axis: top === null ? rounded(axis) : axis, rows, namespaces };
}

function placed(behind, namespace, top, mostAlone) {
  const all = top === null ? itemsBehind(behind, rootOf(namespace)) : [{ node: top }];
  const { items, folded } = folding(behind, all, mostAlone);
  return { ...rowsOf(behind, items), folded };
}

/** Depth first, without recursion: an agent's conversation may be thousands of nodes long. */
function rowsOf(behind, items) {
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
      const inner = itemsBehind(behind, node.id);
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

/** What requests alone stand behind grows with them: its end moves, and would move the axis. */
function grows(items) {
  return items.length > 0 && items.every(({ request, queued }) => request || queued);
}

/**
 * What is computed beyond the stored path, and from there on what is still to be. It begins within
 * its bar where the request has come no further: others have said the same before.
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
