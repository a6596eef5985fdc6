// Which bars light up, and how far: what a prompt has found in the cache a moment ago.

const LIT_SECONDS = 2;

/**
 * For each node that is lit, the token up to which it was found. `seconds`: how old the snapshot is.
 */
export function foundIn(snapshot, seconds) {
  const nodes = new Map(snapshot.nodes.map((node) => [node.id, node]));
  const found = new Map();
  for (const adoption of snapshot.adoptions) {
    if (adoption.seconds + seconds > LIT_SECONDS) continue;
    for (let node = nodes.get(adoption.node); node; node = nodes.get(node.parent)) {
      const until = Math.min(adoption.tokens, node.start + node.tokens);
      found.set(node.id, Math.max(until, found.get(node.id) ?? 0));
    }
  }
  return found;
}
