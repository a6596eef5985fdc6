"""What the store asks of a prefix index. This base class is the index that finds nothing."""

from collections.abc import Iterator, Sequence

from kvstore.index.in_flight import Checkpoint, InFlight, Probe
from kvstore.index.observer import Observers
from kvstore.index.radix_node import Match, Node
from kvstore.types import BlockId, Finding, Namespace


class PrefixIndex:
    """Indexes nothing, so requests share nothing: what `--no-prefix-cache` uses.

    RadixTree overrides all that can be otherwise.
    """

    def __init__(self) -> None:
        self.observers = Observers()

    @property
    def n_nodes(self) -> int:
        """How many nodes there are."""
        return 0

    @property
    def namespaces(self) -> Sequence[Namespace]:
        """Those that have something indexed."""
        return ()

    def match(self, namespace: Namespace, packed: bytes) -> Match:
        """The longest prefix of `packed` that is indexed. Changes nothing, not even recency."""
        return Match(0, (), ())

    def continuation(self, namespace: Namespace, packed: bytes, most: int) -> tuple[int, ...]:
        """The indexed tokens that follow all of `packed`, at most `most`. Changes nothing."""
        return ()

    def has_whole(self, block: BlockId) -> bool:
        """Whether the block is indexed, and not as a tail."""
        return False

    def find_behind(self, block: BlockId, packed: bytes) -> BlockId | None:
        """The indexed block that holds `packed`, up to a block of tokens behind a whole `block`."""
        return None

    def touch(self, match: Match) -> None:
        """Make what was matched the most recently used."""

    def insert(
        self, namespace: Namespace, packed: bytes, blocks: Sequence[BlockId]
    ) -> tuple[BlockId, ...]:
        """Index one or more `blocks` under the tokens that they hold; the last may be a tail.

        Where an equal whole block is indexed already, that one stays. Returns those equal blocks:
        a run from the first block on, to be used in place of the caller's own.
        """
        return ()

    def insert_behind(
        self, block: BlockId, packed: bytes, blocks: Sequence[BlockId]
    ) -> tuple[BlockId, ...]:
        """The same below an indexed whole `block`; `packed` and `blocks` are what follows it."""
        return ()

    def evict(self) -> BlockId | None:
        """Free the least recently used block that can be; None where none can be."""
        return None

    def offer(self, blocks: Sequence[BlockId]) -> None:
        """No table holds these indexed blocks any more: they can be evicted."""

    def clear(self, namespace: Namespace | None = None) -> int:
        """Forget the index of one namespace, or all. Returns how many blocks became free."""
        return 0

    def walk(self) -> Iterator[tuple[Namespace, bytes, Node]]:
        """Every node with the packed tokens from the root to its lower end, parents first."""
        yield from ()

    def nodes(self) -> Iterator[Node]:
        """Every node as it is when it comes up, parents first, while the index may change."""
        yield from ()

    def node_of(self, block: BlockId) -> Node | None:
        """The node that has the block, if it is indexed."""
        return None

    def next_evicted(self, n: int) -> Sequence[Node]:
        """Up to `n` nodes in the order of their eviction."""
        return ()

    def in_flight(self, probe: Probe, checkpoint: Checkpoint) -> InFlight:
        """The prefixes in flight of a store whose leases are indexed here."""
        return InFlight()

    def problems(self) -> Iterator[Finding]:
        """What does not add up besides the nodes."""
        yield from ()
