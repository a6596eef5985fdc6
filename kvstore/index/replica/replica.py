"""The tree's shape as far as its changes have been applied, with what each subtree weighs."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from kvstore.index.replica.changes import (
    Afresh,
    Change,
    ClearedNamespace,
    Removed,
    Split,
    Stored,
    Used,
)
from kvstore.types import BlockId, Namespace

MOST_ADOPTIONS = 32


@dataclass(slots=True)
class Adoption:
    """Of the path that ends with `node` the first `n_tokens` tokens were adopted then."""

    node: int
    n_tokens: int
    seconds: float


@dataclass(slots=True)
class Weight:
    """Nodes, with their tokens and blocks."""

    nodes: int = 0
    tokens: int = 0
    blocks: int = 0

    def add(self, nodes: int, tokens: int, blocks: int) -> None:
        self.nodes += nodes
        self.tokens += tokens
        self.blocks += blocks

    def __iadd__(self, other: "Weight") -> "Weight":
        self.add(other.nodes, other.tokens, other.blocks)
        return self


class ReplicaNode:
    """A node of the tree, or with serial -1 a namespace's root. `start` tokens come before it.

    `weight` is that of the node and all below. `last_used` is the latest of them.
    """

    __slots__ = (
        *("blocks", "children", "last_used", "namespace", "parent", "serial", "start", "tokens"),
        "weight",
    )

    def __init__(
        self, serial: int, namespace: Namespace, parent: "ReplicaNode | None", last_used: float
    ) -> None:
        self.serial = serial
        self.namespace = namespace
        self.parent = parent
        self.last_used = last_used
        self.start: int = parent.start + parent.tokens if parent else 0
        self.tokens: int = 0
        self.blocks: list[BlockId] = []
        self.children: dict[int, ReplicaNode] = {}
        self.weight = Weight()

    def path(self) -> Iterator["ReplicaNode"]:
        """The node and all above it, the root last."""
        node: ReplicaNode | None = self
        while node is not None:
            yield node
            node = node.parent


class TreeReplica:
    """Applies changes in their order. A change costs its blocks and the nodes above it."""

    def __init__(self) -> None:
        self._nodes: dict[int, ReplicaNode] = {}
        self._roots: dict[Namespace, ReplicaNode] = {}
        self._adoptions: deque[Adoption] = deque(maxlen=MOST_ADOPTIONS)

    @property
    def nodes(self) -> Mapping[int, ReplicaNode]:
        """By serial, without the roots."""
        return MappingProxyType(self._nodes)

    @property
    def roots(self) -> Mapping[Namespace, ReplicaNode]:
        """Those with something below."""
        return MappingProxyType(self._roots)

    @property
    def adoptions(self) -> Sequence[Adoption]:
        """The last ones, oldest first. Their nodes may have left the tree."""
        return self._adoptions

    def apply(self, changes: Iterable[Change]) -> None:
        for change in changes:
            match change:
                case Stored():
                    self._store(change)
                case Used():
                    self.use(change.node, change.seconds)
                    self._adoptions.append(Adoption(change.node, change.n_tokens, change.seconds))
                case Split():
                    self._split(change)
                case Removed():
                    self._remove(change)
                case ClearedNamespace():
                    self._clear(change.namespace)
                case Afresh():
                    self._nodes.clear()
                    self._roots.clear()
                    self._adoptions.clear()

    def use(self, serial: int, seconds: float) -> None:
        """The node and all above it were used then."""
        if (used := self._nodes.get(serial)) is not None:
            for node in used.path():
                node.last_used = max(node.last_used, seconds)

    def _store(self, stored: Stored) -> None:
        if stored.behind is None:
            behind: ReplicaNode | None = self._root(stored.namespace)
        else:
            behind = self._nodes.get(stored.behind)
        if behind is None:
            return
        is_new = behind.serial != stored.node
        node = self._new(stored.node, behind, stored.seconds) if is_new else behind
        grown = stored.n_tokens - node.tokens
        node.tokens = stored.n_tokens
        node.blocks += stored.blocks
        for each in node.path():
            each.weight.add(is_new, grown, len(stored.blocks))
            each.last_used = max(each.last_used, stored.seconds)

    def _split(self, split: Split) -> None:
        node = self._nodes.get(split.node)
        if node is None:
            return
        children = node.children
        node.children = {}
        n_tokens, node.tokens = node.tokens, split.n_tokens
        lower = self._new(split.lower, node, node.last_used)
        lower.tokens = n_tokens - split.n_tokens
        lower.blocks, node.blocks = node.blocks[split.n_blocks :], node.blocks[: split.n_blocks]
        lower.children = children
        for child in children.values():
            child.parent = lower
        above = node.weight
        lower.weight = Weight(above.nodes, above.tokens - node.tokens, above.blocks)
        lower.weight.blocks -= len(node.blocks)
        for each in node.path():
            each.weight.nodes += 1
        for adoption in self._adoptions:
            if adoption.node == node.serial and adoption.n_tokens > lower.start:
                adoption.node = lower.serial

    def _remove(self, removed: Removed) -> None:
        node = self._nodes.get(removed.node)
        if node is None:
            return
        is_gone = removed.n_blocks >= len(node.blocks)
        lost = node.tokens - (0 if is_gone else removed.n_tokens)
        for each in node.path():
            each.weight.add(-is_gone, -lost, -removed.n_blocks)
        node.tokens -= lost
        del node.blocks[len(node.blocks) - removed.n_blocks :]
        if is_gone:
            self._forget(node)

    def _forget(self, leaf: ReplicaNode) -> None:
        del self._nodes[leaf.serial]
        parent = leaf.parent
        assert parent is not None, "a root is no leaf"
        del parent.children[leaf.serial]
        if parent.parent is None and not parent.children:
            self._roots.pop(parent.namespace, None)

    def _clear(self, namespace: Namespace) -> None:
        root = self._roots.pop(namespace, None)
        pending = list(root.children.values()) if root else []
        while pending:
            node = pending.pop()
            pending += node.children.values()
            del self._nodes[node.serial]

    def _root(self, namespace: Namespace) -> ReplicaNode:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = ReplicaNode(-1, namespace, None, 0.0)
        return root

    def _new(self, serial: int, parent: ReplicaNode, last_used: float) -> ReplicaNode:
        node = ReplicaNode(serial, parent.namespace, parent, last_used)
        self._nodes[serial] = parent.children[serial] = node
        return node
