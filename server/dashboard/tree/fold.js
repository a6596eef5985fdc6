// Folds prompts that share nothing, which would hide those that do: all but the longest are counted.

/** The items that stay, and the numbers of prompts and tokens that are `folded`. */
export function folding(children, items, mostAlone) {
  const tokens = new Map(items.map((item) => [item, item.node ? tokensAlone(children, item.node) : 0]));
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

/** The length of an unused prompt without branches; 0 for any other. */
function tokensAlone(children, root) {
  let node = root;
  while (node.holders === 0) {
    const { nodes, requests, hidden } = children.get(node.id);
    if (requests.length || hidden || nodes.length > 1) return 0;
    if (nodes.length === 0) return node.start + node.tokens;
    [node] = nodes;
  }
  return 0;
}
