"""Observers of the tree's changes: for pictures of it, a disk tier below it, events for routers.

They are called on the engine thread, right after each change. The nodes are the tree's own: an
observer reads what it needs and keeps `serial`, which identifies a node and is never used again. A
block's id identifies it until it is removed.
"""

from typing import Protocol

from kvstore.index.radix_node import Node
from kvstore.types import Namespace


class TreeObserver(Protocol):
    """Must not block, nor change the tree. Parents are told before their children."""

    def stored(self, node: Node, first: int) -> None:
        """`node.blocks[first:]` are new; with `first` 0 the node is. The last may be a tail."""
        ...

    def split(self, node: Node, lower: Node) -> None:
        """What was the end of `node`, with all that was below, is `lower` now, its only child."""
        ...

    def used(self, node: Node, n_tokens: int) -> None:
        """A lease has adopted the first `n_tokens` tokens of the path that ends with `node`."""
        ...

    def removed(self, node: Node, n_blocks: int) -> None:
        """The leaf has lost its last blocks. It has left the tree where `node.blocks` is empty."""
        ...

    def cleared(self, namespace: Namespace) -> None:
        """All nodes of the namespace have left the tree."""
        ...


class Observers:
    """The observers of one tree, called in the order in which they were added."""

    def __init__(self) -> None:
        self._all: tuple[TreeObserver, ...] = ()

    def add(self, observer: TreeObserver) -> None:
        self._all += (observer,)

    def remove(self, observer: TreeObserver) -> None:
        """Does nothing for an observer that was not added."""
        self._all = tuple(each for each in self._all if each is not observer)

    def stored(self, node: Node, first: int) -> None:
        for observer in self._all:
            observer.stored(node, first)

    def split(self, node: Node, lower: Node) -> None:
        for observer in self._all:
            observer.split(node, lower)

    def used(self, node: Node, n_tokens: int) -> None:
        for observer in self._all:
            observer.used(node, n_tokens)

    def removed(self, node: Node, n_blocks: int) -> None:
        for observer in self._all:
            observer.removed(node, n_blocks)

    def cleared(self, namespace: Namespace) -> None:
        for observer in self._all:
            observer.cleared(namespace)
