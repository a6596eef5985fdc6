"""Records the tree's changes for a replica on another thread."""

from collections.abc import Iterator
from itertools import islice

from kvstore.index.prefix_index import PrefixIndex
from kvstore.index.radix_node import Node
from kvstore.index.replica.changes import (
    Afresh,
    Change,
    ClearedNamespace,
    Removed,
    Split,
    Stored,
    Used,
)
from kvstore.tokens import TOKEN_BYTES
from kvstore.types import Namespace

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
