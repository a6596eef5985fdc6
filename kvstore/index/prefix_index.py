"""What the store asks of a prefix index, and the index that finds nothing."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from kvstore.index.announcements import Announcements, Checkpoint, NoAnnouncements, Probe
from kvstore.index.observer import Observers
from kvstore.index.radix_node import Match, Node
from kvstore.types import BlockId, Namespace


class PrefixIndex(Protocol):
    """See RadixTree, whose methods these are."""

    @property
    def n_nodes(self) -> int: ...

    @property
    def observers(self) -> Observers: ...

    @property
    def namespaces(self) -> Sequence[Namespace]: ...

    def nodes(self) -> Iterator[Node]: ...

    def node_of(self, block: BlockId) -> Node | None: ...

    def next_evicted(self, n: int) -> Sequence[Node]: ...

    def match(self, namespace: Namespace, packed: bytes) -> Match: ...

    def touch(self, match: Match) -> None: ...

    def insert(
        self, namespace: Namespace, packed: bytes, blocks: Sequence[BlockId]
    ) -> tuple[BlockId, ...]: ...

    def insert_behind(
        self, block: BlockId, packed: bytes, blocks: Sequence[BlockId]
    ) -> tuple[BlockId, ...]: ...

    def has_whole(self, block: BlockId) -> bool: ...

    def holder_behind(self, block: BlockId, packed: bytes) -> BlockId | None: ...

    def evict(self) -> BlockId | None: ...

    def offer(self, blocks: Sequence[BlockId]) -> None: ...

    def clear(self, namespace: Namespace | None = None) -> int: ...

    def walk(self) -> Iterator[tuple[Namespace, bytes, Node]]: ...

    def problems(self) -> Iterator[str]: ...

    def announcements(self, probe: Probe, checkpoint: Checkpoint) -> Announcements: ...


class NoIndex:
    """Shares nothing between requests: what `--no-prefix-cache` puts in the tree's place."""

    n_nodes = 0
    namespaces: Sequence[Namespace] = ()

    def __init__(self) -> None:
        self.observers = Observers()  # who wait for what never happens

    def nodes(self) -> Iterator[Node]:
        return iter(())

    def node_of(self, block: BlockId) -> Node | None:
        return None

    def next_evicted(self, n: int) -> Sequence[Node]:
        return ()

    def match(self, namespace: Namespace, packed: bytes) -> Match:
        return Match(0, (), ())

    def touch(self, match: Match) -> None:
        """There is nothing that could grow old."""

    def insert(
        self, namespace: Namespace, packed: bytes, blocks: Sequence[BlockId]
    ) -> tuple[BlockId, ...]:
        return ()

    def insert_behind(
        self, block: BlockId, packed: bytes, blocks: Sequence[BlockId]
    ) -> tuple[BlockId, ...]:
        return ()

    def has_whole(self, block: BlockId) -> bool:
        return False

    def holder_behind(self, block: BlockId, packed: bytes) -> BlockId | None:
        return None

    def evict(self) -> BlockId | None:
        return None

    def offer(self, blocks: Sequence[BlockId]) -> None:
        """No block is ever indexed, so none is ever left to the index."""

    def clear(self, namespace: Namespace | None = None) -> int:
        return 0

    def walk(self) -> Iterator[tuple[Namespace, bytes, Node]]:
        return iter(())

    def problems(self) -> Iterator[str]:
        return iter(())

    def announcements(self, probe: Probe, checkpoint: Checkpoint) -> Announcements:
        return NoAnnouncements()
