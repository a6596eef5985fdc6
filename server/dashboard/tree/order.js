// The children of each node, in the order in which they are drawn: those in use first, then the
// cached ones, each by age, so that nothing jumps.

/** For each node, and for each namespace's root: its child nodes, its requests, and the nodes that are left out. */
export function childrenOf(snapshot) {
  const known = new Map(snapshot.nodes.map((node) => [node.id, node]));
  const children = new Map();
  const entry = (key) => {
    if (!children.has(key)) children.set(key, { nodes: [], requests: [] });
    return children.get(key);
  };
  for (const node of snapshot.nodes) {
    entry(node.id).hidden = node.hidden;
    entry(node.parent ?? rootOf(node.namespace)).nodes.push(node);
  }
  for (const request of snapshot.requests) {
    const isShown = known.has(request.node);
    entry(isShown ? request.node : rootOf(request.namespace)).requests.push(request);
  }
  for (const { nodes } of children.values()) nodes.sort((one, other) => one.id - other.id);
  return children;
}

export function rootOf(namespace) {
  return `root of ${namespace}`;
}

const SHOWN_QUEUED = 2; // queued requests that are drawn after one key; the others are counted

/** The items after a node or a root: each has a node, a request, the number `queued` of further requests, or `hidden` nodes. */
export function itemsAfter(children, key) {
  const { nodes, requests, hidden } = children.get(key) ?? { nodes: [], requests: [] };
  const isRunning = (request) => request.state === "running";
  const queued = requests.filter((request) => !isRunning(request));
  const folded = queued.length - SHOWN_QUEUED;
  const isUsed = (node) => node.holders > 0 || children.get(node.id).requests.some(isRunning);
  return [
    ...nodes.filter(isUsed).map((node) => ({ node })),
    ...requests.filter(isRunning).map((request) => ({ request })),
    ...nodes.filter((node) => !isUsed(node)).map((node) => ({ node })),
    ...queued.slice(0, SHOWN_QUEUED).map((request) => ({ request })),
    ...(folded > 0 ? [{ queued: folded }] : []),
    ...(hidden ? [{ hidden }] : []),
  ];
}
