"""The cache's prefixes as the rows of a tree, held and heavy ones first; prompts that share nothing
are folded.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from server.schemas import CacheTree, TreeNode

MOST_ALONE = 5
"""The most prompts that share nothing and still have rows of their own; the others are folded."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """A row of the tree. `guide` draws the branches before it; `weight` counts the tokens of the
    node and of all its descendants.
    """

    guide: str
    node: TreeNode
    weight: int


@dataclass(frozen=True, slots=True)
class Prefixes:
    """The rows; the prompts that share nothing and are folded; and the nodes that are left out."""

    rows: Sequence[Prefix]
    folded_prompts: int
    folded_tokens: int
    left_nodes: int
    left_tokens: int


def heaviest(picture: CacheTree, n_rows: int, most_alone: int = MOST_ALONE) -> Prefixes:
    """At most `n_rows` nodes, chosen one by one: the heaviest node whose parent is chosen already,
    and before all others one that a running request holds. Siblings come in the same order.

    Prompts that share nothing are chosen last, and at most `most_alone` of them.
    """
    children: defaultdict[int | None, list[TreeNode]] = defaultdict(list)
    for node in picture.nodes:
        children[node.parent].append(node)
    weights = _weights(picture.nodes)
    alone = _alone(picture, children)
    kept = set(heapq.nlargest(most_alone, alone, key=lambda root: (weights[root], -root)))
    chosen = _chosen(children, weights, n_rows, alone.keys(), alone.keys() - kept)
    drawn = {
        parent: sorted(
            (n for n in nodes if n.id in chosen), key=lambda n: (not n.holders, -weights[n.id])
        )
        for parent, nodes in children.items()
    }
    rows = list(_rows(drawn, weights))
    everything = sum(weights[root.id] for root in children[None]) + picture.hidden.tokens
    hidden = picture.hidden.nodes + sum(n.hidden.nodes for n in picture.nodes if n.hidden)
    folded = alone.keys() - chosen
    folded_tokens = sum(weights[root] for root in folded)
    left = len(picture.nodes) - len(rows) + hidden - sum(alone[root] for root in folded)
    left_tokens = everything - sum(row.node.tokens for row in rows) - folded_tokens
    return Prefixes(rows, len(folded), folded_tokens, left, left_tokens)


def _weights(nodes: Sequence[TreeNode]) -> Mapping[int, int]:
    """Tokens of each node and all its descendants, by the node's id."""
    weights = {n.id: n.tokens + (n.hidden.tokens if n.hidden else 0) for n in nodes}
    for node in reversed(nodes):  # children before their parents
        if node.parent is not None:
            weights[node.parent] += weights[node.id]
    return weights


def _alone(picture: CacheTree, children: Mapping[int | None, list[TreeNode]]) -> Mapping[int, int]:
    """The roots of prompts that share nothing: no live request uses them and nothing branches off
    them. The values are how many nodes each has.
    """
    used = {request.node for request in picture.requests}

    def n_nodes(root: TreeNode) -> int:
        path = [root]
        while path[-1].id not in used and not path[-1].holders and not path[-1].hidden:
            match children.get(path[-1].id, []):
                case []:
                    return len(path)
                case [only]:
                    path.append(only)
                case _:
                    return 0
        return 0

    return {root.id: n for root in children[None] if (n := n_nodes(root))}


def _chosen(
    children: Mapping[int | None, list[TreeNode]],
    weights: Mapping[int, int],
    n_rows: int,
    last: Set[int],
    never: Set[int],
) -> Set[int]:
    """The ids of at most `n_rows` nodes, always with their parents. Nodes below the roots `last`
    are chosen after all others, those below the roots `never` not at all.
    """
    chosen: set[int] = set()
    open_nodes = [
        (node.id in last, not node.holders, -weights[node.id], node.id)
        for node in children[None]
        if node.id not in never
    ]
    heapq.heapify(open_nodes)
    while open_nodes and len(chosen) < n_rows:
        is_last, *_, node_id = heapq.heappop(open_nodes)
        chosen.add(node_id)
        for child in children.get(node_id, ()):
            heapq.heappush(open_nodes, (is_last, not child.holders, -weights[child.id], child.id))
    return chosen


def _rows(
    drawn: Mapping[int | None, list[TreeNode]], weights: Mapping[int, int]
) -> Iterator[Prefix]:
    """The rows, depth first; without recursion, because a tree may be deep."""
    open_nodes = [("", "", root) for root in reversed(drawn.get(None, []))]
    while open_nodes:
        indent, branch, node = open_nodes.pop()
        yield Prefix(indent + branch, node, weights[node.id])
        inner = indent + {"": "", "├ ": "│ ", "└ ": "  "}[branch]
        below = drawn.get(node.id, [])
        branches = ["├ "] * (len(below) - 1) + ["└ "] if below else []
        open_nodes += [
            (inner, ahead, child)
            for ahead, child in reversed(list(zip(branches, below, strict=True)))
        ]
