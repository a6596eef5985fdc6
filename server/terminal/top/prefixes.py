"""The heaviest prefixes of a picture, as the rows of a tree."""

import heapq
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from server.schemas.cache_tree import CacheTree, TreeNode


@dataclass(frozen=True, slots=True)
class Prefix:
    """A row. `guide` draws the branches before it, `weight` counts its tokens and all below."""

    guide: str
    node: TreeNode
    weight: int


@dataclass(frozen=True, slots=True)
class Prefixes:
    """The rows, and how much there is besides."""

    rows: Sequence[Prefix]
    left_nodes: int
    left_tokens: int


def heaviest(picture: CacheTree, n_rows: int) -> Prefixes:
    """At most so many nodes: always the heaviest of those whose parents are among them."""
    children: defaultdict[int | None, list[TreeNode]] = defaultdict(list)
    for node in picture.nodes:
        children[node.parent].append(node)
    weights = _weights(picture.nodes)
    chosen = _chosen(children, weights, n_rows)
    drawn = {
        parent: sorted((n for n in nodes if n.id in chosen), key=lambda n: -weights[n.id])
        for parent, nodes in children.items()
    }
    rows = list(_rows(drawn, weights))
    everything = sum(weights[root.id] for root in children[None]) + picture.hidden.tokens
    hidden = picture.hidden.nodes + sum(n.hidden.nodes for n in picture.nodes if n.hidden)
    left = len(picture.nodes) - len(rows) + hidden
    return Prefixes(rows, left, everything - sum(row.node.tokens for row in rows))


def _weights(nodes: Sequence[TreeNode]) -> Mapping[int, int]:
    """Tokens by node, those of all its descendants included."""
    weights = {n.id: n.tokens + (n.hidden.tokens if n.hidden else 0) for n in nodes}
    for node in reversed(nodes):  # children before their parents
        if node.parent is not None:
            weights[node.parent] += weights[node.id]
    return weights


def _chosen(
    children: Mapping[int | None, list[TreeNode]], weights: Mapping[int, int], n_rows: int
) -> set[int]:
    chosen: set[int] = set()
    open_nodes = [(-weights[node.id], node.id) for node in children[None]]
    heapq.heapify(open_nodes)
    while open_nodes and len(chosen) < n_rows:
        _, node_id = heapq.heappop(open_nodes)
        chosen.add(node_id)
        for child in children.get(node_id, ()):
            heapq.heappush(open_nodes, (-weights[child.id], child.id))
    return chosen


def _rows(
    drawn: Mapping[int | None, list[TreeNode]], weights: Mapping[int, int]
) -> Iterator[Prefix]:
    """Depth first; without recursion, as deep as a tree may be."""
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
