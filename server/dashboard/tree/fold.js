// Prompts that share nothing would bury those that do: all but the longest are only counted.

/** The items that stay, and what is `folded` of them: prompts with their tokens. */
export function folding(behind, items, mostAlone) {
  const tokens = new Map(items.map((item) => [item, item.node ? tokensAlone(behind, item.node) : 0]));
  const alone = items.filter((item) => tokens.get(item) > 0);
  const folded = new Set(
    alone.sort((one, other) => tokens.get(other) - tokens.get(one)).slice(mostAlone),
  );
  return {
    items: items.filter((item) => !folded.has(item)),
    folded: {
      prompts: folded.size,
      tokens: [...folded].reduce((sum, item) => sum + tokens.get(item), 0),
    },
  };
}

/** How long a prompt is that nobody uses and that nothing branches off; else 0. */
function tokensAlone(behind, root) {
  let node = root;
  while (node.holders === 0) {
    const { nodes, requests, hidden } = behind.get(node.id);
    if (requests.length || hidden || nodes.length > 1) return 0;
    if (nodes.length === 0) return node.start + node.tokens;
    [node] = nodes;
  }
  return 0;
}
