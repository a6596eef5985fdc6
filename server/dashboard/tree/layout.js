// From a snapshot to places: tokens along x, rows along y. No pixels and no drawing.

const ENDS = [1, 1.1, 1.25, 1.4, 1.6, 1.8, 2, 2.25, 2.5, 3, 3.5, 4, 4.5, 5, 6, 7, 8, 9, 10];
const STEPS = [1, 2, 2.5, 5, 10];

/**
 * The picture of all there is, or of one node with all behind it: the axis begins with token `from`
 * and ends with `to`; `rows`; and for each namespace its bars (a node from token `from` to `to`, as
 * many rows high as all that fans out behind it), lanes (what a request has beyond its node) and
 * rests (descendants that the snapshot leaves out).
 */
export function layout(snapshot, top = null) {
  const children = childrenOf(snapshot);
  const namespaces = snapshot.namespaces
    .filter(({ id }) => top === null || top.namespace === id)
    .map((namespace) => ({ ...namespace, ...place(children, namespace.id, top) }))
    .filter((namespace) => namespace.rows > 0);
  const pieces = namespaces.flatMap(({ bars, lanes }) => [...bars, ...lanes]);
  const last = pieces.reduce((most, piece) => Math.max(most, piece.to), 1);
  const rows = namespaces.reduce((sum, namespace) => sum + namespace.rows, 0);
  const [from, to] = top === null ? [0, roundedUp(last, ENDS)] : [top.start, last];
  return { from, to, rows, namespaces };
}

/** The first of `steps`, times a power of ten, that is not below. */
function roundedUp(number, steps) {
  const power = 10 ** Math.floor(Math.log10(number));
  return power * steps.find((step) => step * power >= number);
}

/** Tokens at which the axis has a line: a handful of round numbers. */
export function ticks({ from, to }, most) {
  const step = Math.max(1, roundedUp((to - from) / most, STEPS));
  const [first, last] = [Math.ceil(from / step), Math.floor(to / step)];
  return Array.from({ length: last - first + 1 }, (_, index) => (first + index) * step);
}

function rootOf(namespace) {
  return `root of ${namespace}`;
}

/** What stands behind each node, in the order in which it came to be, so that nothing jumps. */
function childrenOf(snapshot) {
  const known = new Map(snapshot.nodes.map((node) => [node.id, node]));
  const children = new Map();
  const entry = (key) => {
    if (!children.has(key)) children.set(key, { nodes: [], requests: [] });
    return children.get(key);
  };
  for (const node of snapshot.nodes) {
    entry(node.parent ?? rootOf(node.namespace)).nodes.push(node);
  }
  for (const request of snapshot.requests) {
    const isShown = known.has(request.node);
    entry(isShown ? request.node : rootOf(request.namespace)).requests.push(request);
  }
  for (const { nodes } of children.values()) nodes.sort((one, other) => one.id - other.id);
  return children;
}

/** Depth first, without recursion: an agent's conversation may be thousands of nodes long. */
function place(children, namespace, top) {
  const placed = { bars: [], lanes: [], rests: [] };
  const open = [];
  let rows = 0;
  const enter = (key, bar) => {
    const { nodes = [], requests = [] } = children.get(key) ?? {};
    open.push({ bar, nodes, requests, next: 0 });
  };
  if (top === null) enter(rootOf(namespace), null);
  else open.push({ bar: null, nodes: [top], requests: [], next: 0 });
  while (open.length) {
    const { bar, nodes, requests, next } = open.at(-1);
    if (next < nodes.length) {
      open.at(-1).next += 1;
      const node = nodes[next];
      const child = { node, from: node.start, to: node.start + node.tokens, row: rows, rows: 1 };
      placed.bars.push(child);
      enter(node.id, child);
      continue;
    }
    open.pop();
    for (const request of requests) {
      placed.lanes.push(lane(request, bar, rows));
      rows += 1;
    }
    if (bar?.node.hidden) {
      placed.rests.push({ ...bar.node.hidden, id: bar.node.id, from: bar.to, row: rows });
      rows += 1;
    }
    if (bar === null) break;
    rows = Math.max(rows, bar.row + 1);
    bar.rows = rows - bar.row;
  }
  return { ...placed, rows };
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
