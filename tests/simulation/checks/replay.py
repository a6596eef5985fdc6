"""Somebody who is told how the tree changes, and must end with exactly the tree."""

from collections.abc import Iterator
from random import Random

from kvstore.replica import ReplicaNode, TreeJournal, TreeReplica, Weight
from kvstore.tokens import TOKEN_BYTES
from kvstore.tree import PrefixIndex


class Replay:
    """Takes what it is told as it likes: now and then, bit by bit, or after having left."""

    def __init__(self, index: PrefixIndex, random: Random) -> None:
        self._index = index
        self._random = random
        self._leave_rate = random.choice([0.0, 0.0, 0.02])
        copied_nodes = random.choice([1, 2, 1000])
        most_changes = random.choice([3, 30, 1000])
        self._journal = TreeJournal(index, copied_nodes, most_changes)
        self.replica = TreeReplica()

    def step(self) -> None:
        """Perhaps take what there is by now; where that is all, it is the tree."""
        if self._random.random() < self._leave_rate:
            self._journal.close()
        if self._random.random() < 0.5:
            changes, is_whole = self._journal.take()
            self.replica.apply(changes)
            if is_whole:
                self.check()

    def finish(self) -> None:
        """Take all that is left."""
        is_whole = False
        while not is_whole:
            changes, is_whole = self._journal.take()
            self.replica.apply(changes)
        self.check()

    def check(self) -> None:
        told = sorted(map(_told, self.replica.nodes.values()))
        assert told == sorted(_there(self._index)), "another tree than the one that was told"
        for root in self.replica.roots.values():
            _check_weights(root)


Row = tuple[int, int | None, str, int, int, tuple[int, ...]]


def _told(node: ReplicaNode) -> Row:
    parent = node.parent
    above = None if parent is None or parent.parent is None else parent.serial
    salt = node.namespace.cache_salt
    return node.serial, above, salt, node.start, node.tokens, tuple(node.blocks)


def _there(index: PrefixIndex) -> Iterator[Row]:
    for namespace, path, node in index.walk():
        parent = node.parent
        above = parent.serial if parent is not None and parent.blocks else None
        n_tokens = len(node.packed) // TOKEN_BYTES
        start = len(path) // TOKEN_BYTES - n_tokens
        yield node.serial, above, namespace.cache_salt, start, n_tokens, tuple(node.blocks)


def _check_weights(node: ReplicaNode) -> Weight:
    """Recounts all that is below."""
    weight = Weight(int(node.parent is not None), node.tokens, len(node.blocks))
    for child in node.children.values():
        weight += _check_weights(child)
        assert child.last_used <= node.last_used
    assert weight == node.weight
    return weight
