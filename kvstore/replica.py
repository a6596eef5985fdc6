"""A copy of the tree's shape on another thread, so that pictures of it cost the engine nothing."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import TypeAlias

from kvstore.tokens import TOKEN_BYTES
from kvstore.tree import Node, PrefixIndex
from kvstore.types import BlockId, Namespace


@dataclass(frozen=True, slots=True)
class Stored:
    """`blocks` follow what `behind` ends with: `node` itself, its parent, or None for a root.

    The node has `n_tokens` tokens now.
    """

    node: int
    behind: int | None
    namespace: Namespace
    n_tokens: int
    blocks: tuple[BlockId, ...]
    seconds: float  # of the clock, when it was last used


@dataclass(frozen=True, slots=True)
class Split:
    """`node` keeps its first `n_blocks` blocks, which are `n_tokens` tokens; the rest and what is
    below go to `lower`.
    """

    node: int
    lower: int
    n_blocks: int
    n_tokens: int


@dataclass(frozen=True, slots=True)
class Used:
    """Of the path that ends with `node` the first `n_tokens` tokens were adopted then."""

    node: int
    n_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Removed:
    """The last `n_blocks` blocks of a leaf are gone: with all of them the node.

    `n_tokens` tokens are left of it where it is not gone.
    """

    node: int
    n_blocks: int
    n_tokens: int


@dataclass(frozen=True, slots=True)
class ClearedNamespace:
    namespace: Namespace


@dataclass(frozen=True, slots=True)
class Afresh:
    """Forget all: the changes that follow tell the tree from its beginning."""


Change: TypeAlias = Stored | Split | Used | Removed | ClearedNamespace | Afresh
"""A change of a node that the replica does not know is ignored: the node is yet to be told."""


COPIED_NODES = 500
"""The most nodes that one `take` copies of the tree as it was: a millisecond or two."""

MOST_CHANGES = 50_000
"""The most changes that wait to be taken. Beyond, all are dropped and the tree is told afresh."""


class TreeJournal:
    """A TreeObserver from `open` to `close`. Belongs to the engine thread."""

    def __init__(
        self,
        index: PrefixIndex,
        copied_nodes: int = COPIED_NODES,
        most_changes: int = MOST_CHANGES,
    ) -> None:
        self._index = index
        self._copied_nodes = copied_nodes
        self._most_changes = most_changes
        self._changes: list[Change] = []
        self._copy: Iterator[Node] = iter(())
        self._is_listening = False
        self._is_copied = False

    def open(self) -> None:
        """Begin with the tree as it is."""
        self.close()
        self._changes.append(Afresh())
        self._copy = self._index.nodes()
        self._is_listening, self._is_copied = True, False
        self._index.observers.add(self)

    def close(self) -> None:
        """Record nothing more, and drop what was recorded."""
        self._index.observers.remove(self)
        self._is_listening = False
        self._changes.clear()
        self._copy = iter(())

    def take(self) -> tuple[list[Change], bool]:
        """What has changed since this was last asked, and whether that is all there is by now.

        Costs what has changed, and `copied_nodes` of a tree that is being told.
        """
        if not self._is_listening:
            self.open()
        copied = [_stored(node, 0) for node in islice(self._copy, self._copied_nodes)]
        self._is_copied = self._is_copied or len(copied) < self._copied_nodes
        self._changes += copied
        changes, self._changes = self._changes, []
        return changes, self._is_copied

    def stored(self, node: Node, first: int) -> None:
        self._note(_stored(node, first))

    def split(self, node: Node, lower: Node) -> None:
        self._note(Split(node.serial, lower.serial, len(node.blocks), _n_tokens(node)))

    def used(self, node: Node, n_tokens: int) -> None:
        self._note(Used(node.serial, n_tokens, node.last_used))

    def removed(self, node: Node, n_blocks: int) -> None:
        self._note(Removed(node.serial, n_blocks, _n_tokens(node)))

    def cleared(self, namespace: Namespace) -> None:
        self._note(ClearedNamespace(namespace))

    def _note(self, change: Change) -> None:
        if len(self._changes) >= self._most_changes:
            self.close()
        else:
            self._changes.append(change)


def _stored(node: Node, first: int) -> Stored:
    return Stored(
        node=node.serial,
        behind=node.serial if first else _serial_above(node),
        namespace=node.namespace,
        n_tokens=_n_tokens(node),
        blocks=tuple(node.blocks[first:]),
        seconds=node.last_used,
    )


def _serial_above(node: Node) -> int | None:
    parent = node.parent
    return parent.serial if parent is not None and parent.blocks else None


def _n_tokens(node: Node) -> int:
    return len(node.packed) // TOKEN_BYTES


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
