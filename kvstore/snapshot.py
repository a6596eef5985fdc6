"""A bounded copy of the tree for dashboards: nodes in use and the heaviest subtrees.

The walk visits the heaviest candidates first, so its cost grows with the nodes that it shows and
their children. The sums of each subtree cover the omitted nodes.
"""

import heapq
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain, islice
from operator import attrgetter
from typing import NamedTuple

from kvstore.node import Node
from kvstore.tokens import Digest
from kvstore.tree import RadixTree
from kvstore.types import BlockId, Namespace


class NodeView(NamedTuple):
    """A copy of a node. The `subtree_` sums include the node itself."""

    serial: int
    parent: int | None  # the parent's serial; None below a root
    namespace: Namespace
    start: int  # the tokens before it
    n_tokens: int
    blocks: tuple[BlockId, ...]
    hashes: tuple[Digest, ...]
    last_used: float  # infinity while a running sequence holds some of its blocks
    holders: int  # running sequences that hold its last block
    subtree_nodes: int
    subtree_tokens: int
    subtree_blocks: int


class TreeView(NamedTuple):
    """The nodes of a tree that are shown, parents before children, and sums over all nodes."""

    nodes: tuple[NodeView, ...]
    namespaces: Mapping[Namespace, tuple[int, int]]  # nodes and tokens of each that is shown
    n_nodes: int
    n_tokens: int
    n_blocks: int


class AdoptionView(NamedTuple):
    """A lease adopted `n_tokens` cached tokens at `seconds`."""

    path: tuple[int, ...]  # serials, from the node with the last of these tokens up
    n_tokens: int
    seconds: float


EMPTY = TreeView((), {}, 0, 0, 0)


def tree_view(tree: RadixTree, holders: Mapping[Node, int], most_nodes: int) -> TreeView:
    """Copy at most `most_nodes` nodes: those in `holders`, then the others, each by weight. Sums
    that are outdated are added up first.

    `holders` has, for each node in use and each of its ancestors, how many running sequences hold
    its last block.
    """
    tree.add_up()
    views, ends = list[NodeView](), dict[Node, int]()
    namespaces = dict[Namespace, tuple[int, int]]()
    for node in _heaviest(tree, holders, most_nodes):
        parent = node.parent
        assert parent is not None, "a root is not shown"
        above: int | None = parent.serial
        if not parent.blocks:
            above = None
            namespaces[node.namespace] = parent.subtree_nodes, parent.subtree_tokens
        start = ends.get(parent, 0)
        ends[node] = start + node.n_tokens
        views.append(
            NodeView(
                node.serial,
                above,
                node.namespace,
                start,
                node.n_tokens,
                tuple(node.blocks),
                tuple(node.hashes),
                math.inf if node in holders else node.last_used,
                holders.get(node, 0),
                node.subtree_nodes,
                node.subtree_tokens,
                node.subtree_blocks,
            )
        )
    roots = tree.roots.values()
    n_nodes = sum(root.subtree_nodes for root in roots)
    n_tokens = sum(root.subtree_tokens for root in roots)
    n_blocks = sum(root.subtree_blocks for root in roots)
    return TreeView(tuple(views), namespaces, n_nodes, n_tokens, n_blocks)


def adoption_views(tree: RadixTree) -> tuple[AdoptionView, ...]:
    """The latest adoptions whose blocks are still indexed, oldest first."""
    views = list[AdoptionView]()
    for adoption in tree.adoptions:
        if (node := tree.node_of(adoption.block)) is None:
            continue
        path = tuple(node.path())
        end = sum(each.n_tokens for each in path)
        if end - node.n_tokens < adoption.n_tokens <= end:  # else it was indexed elsewhere since
            serials = tuple(each.serial for each in path)
            views.append(AdoptionView(serials, adoption.n_tokens, adoption.seconds))
    return tuple(views)


MAX_SIBLINGS = 5_000
"""How many children of a node, or of all roots, are considered: the first by their tokens."""


def _heaviest(tree: RadixTree, holders: Collection[Node], most: int) -> Iterator[Node]:
    """A parent weighs more than each of its children, so it comes before them."""
    held = sorted(holders, key=attrgetter("subtree_tokens"), reverse=True)[:most]
    yield from held
    room = most - len(held)
    heap = [(-node.subtree_tokens, node.serial, node) for node in held]
    siblings: Iterable[Node] = chain.from_iterable(root.children for root in tree.roots.values())
    weights = [0] * room  # of the heaviest candidates so far: what is lighter has no place
    while room:
        for node in islice(siblings, MAX_SIBLINGS):
            weight = node.subtree_tokens
            if weight > weights[0] and node not in holders:
                heapq.heappush(heap, (-weight, node.serial, node))
                heapq.heapreplace(weights, weight)
        if not heap:
            return
        node = heapq.heappop(heap)[2]
        if node not in holders:
            room -= 1
            yield node
        siblings = node.children
