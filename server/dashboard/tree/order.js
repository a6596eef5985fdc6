// What stands behind what, and in which order: what runs now comes first, then what is kept.
// Otherwise things stay in the order in which they came to be, so that nothing jumps.

/** By node, or by a namespace's root, the nodes and requests behind it, and what is left out. */
export function behindOf(snapshot) {
  const known = new Map(snapshot.nodes.map((node) => [node.id, node]));
  const behind = new Map();
  const entry = (key) => {
    if (!behind.has(key)) behind.set(key, { nodes: [], requests: [] });
    return behind.get(key);
  };
  for (const node of snapshot.nodes) {
    entry(node.id).hidden = node.hidden;
    entry(node.parent ?? rootOf(node.namespace)).nodes.push(node);
  }
  for (const request of snapshot.requests) {
    const isShown = known.has(request.node);
    entry(isShown ? request.node : rootOf(request.namespace)).requests.push(request);
  }
  for (const { nodes } of behind.values()) nodes.sort((one, other) => one.id - other.id);
  return behind;
}

export function rootOf(namespace) {
  return `root of ${namespace}`;
}

const SHOWN_QUEUED = 2; // queued requests that are drawn after one key; the others are counted

/** The items after a key: each has a node, a request, the number `queued` of further requests, or `hidden` nodes. */
export function itemsBehind(behind, key) {
  const { nodes, requests, hidden } = behind.get(key) ?? { nodes: [], requests: [] };
  const isRunning = (request) => request.state === "running";
  const queued = requests.filter((request) => !isRunning(request));
  const folded = queued.length - SHOWN_QUEUED;
  const isUsed = (node) => node.holders > 0 || behind.get(node.id).requests.some(isRunning);
  return [
    ...nodes.filter(isUsed).map((node) => ({ node })),
    ...requests.filter(isRunning).map((request) => ({ request })),
    ...nodes.filter((node) => !isUsed(node)).map((node) => ({ node })),
    ...queued.slice(0, SHOWN_QUEUED).map((request) => ({ request })),
    ...(folded > 0 ? [{ queued: folded }] : []),
    ...(hidden ? [{ hidden }] : []),
  ];
}
