"""What the engine thread tells a watcher between two steps: the changes since the last snapshot.

Its cost grows with these, with the live sequences and, at the speed of a copy, with the slots of
windows and states in use; not with the tree.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from engine.core.metrics import LatencyTracker
from engine.core.scheduler import Scheduler
from engine.core.sequence import LiveSequence
from engine.values.picture import GroupSlots, RequestState
from engine.values.request import WaitReason
from engine.values.stats import LoopStats, RecentHits
from kvstore.lease import Lease
from kvstore.recurrent import RecurrentGroup
from kvstore.replica import Change, TreeJournal
from kvstore.slots import Group
from kvstore.tokens import Digest, root_digest
from kvstore.types import BlockId, Namespace
from kvstore.window import WindowGroup

UNSALTED_ID = "0"


def namespace_id(namespace: Namespace) -> str:
    """That of an adapter or a salt; UNSALTED_ID for the model's own."""
    is_own = not (namespace.adapter or namespace.cache_salt)
    return UNSALTED_ID if is_own else _root_id(root_digest(namespace))


def find_namespace(name: str, namespaces: Iterable[Namespace]) -> Namespace | None:
    return next((each for each in namespaces if namespace_id(each) == name), None)


def find_root(name: str, roots: Iterable[Digest]) -> Digest | None:
    """Of namespaces of which only the digest is known: salted ones, those of former adapters."""
    return next((root for root in roots if _root_id(root) == name), None)


def _root_id(root: Digest) -> str:
    return root.hex()[:12]


SHOWN_REQUESTS = 128
NEXT_EVICTED = 8


@dataclass(frozen=True, slots=True)
class Live:
    """A live sequence. `node` is the tree's node with the last of its blocks that are there."""

    id: str
    namespace: Namespace
    state: RequestState
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    output_tokens: int
    node: int | None
    has_all: bool  # of the node, its last block included


@dataclass(frozen=True, slots=True)
class Moment:
    """All but the tree, at one moment."""

    live: tuple[Live, ...]  # all that run, and the first of those that wait
    waiting: int
    blocks: tuple[int, int, int, int]  # in all, free, cached, held
    saved_bytes: int
    groups: tuple[GroupSlots, ...]
    windows: tuple[frozenset[BlockId], ...]  # of each, the blocks with a slot attached
    states: Mapping[BlockId, tuple[int, ...]]  # of each block, the tokens at which it has one
    next_evicted: tuple[int, ...]
    recent_hits: tuple[RecentHits, ...]
    counters: tuple[int, int, int, int, int, float]  # as PictureCounters has them, but `requests`


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The changes since the snapshot before. `is_whole`: they now add up to the whole tree."""

    seconds: float  # of the tree's clock
    changes: Sequence[Change]
    is_whole: bool
    moment: Moment


class SnapshotTaker:
    """Takes snapshots on the engine thread, from its making until `close`."""

    def __init__(
        self, scheduler: Scheduler, latency: LatencyTracker, published: Callable[[], LoopStats]
    ) -> None:
        self._scheduler = scheduler
        self._latency = latency
        self._published = published
        self._index = scheduler.store.index
        self._journal = TreeJournal(self._index)

    def take(self) -> Snapshot:
        changes, is_whole = self._journal.take()
        return Snapshot(self._latency.now(), changes, is_whole, self._moment())

    def close(self) -> None:
        self._journal.close()

    def token_ids(self, serial: int, block: BlockId, most_tokens: int) -> tuple[int, ...] | None:
        """The node's first tokens, or None if the block is not in that node any more."""
        node = self._index.node_of(block)
        if node is None or node.serial != serial:
            return None
        return node.token_ids(most_tokens)

    def _moment(self) -> Moment:
        scheduler, store = self._scheduler, self._scheduler.store
        waiting = islice(scheduler.waiting, SHOWN_REQUESTS)
        pool, groups, published = store.pool, store.groups, self._published()
        return Moment(
            live=tuple(map(self._live, (*scheduler.running, *waiting))),
            waiting=scheduler.n_waiting,
            blocks=(pool.n_blocks, pool.n_free, pool.n_evictable, pool.n_referenced),
            saved_bytes=published.cache.saved_bytes,
            groups=tuple(_slots(group) for group in groups),
            windows=tuple(g.slots.blocks() for g in groups if isinstance(g, WindowGroup)),
            states=_states(groups),
            next_evicted=tuple(node.serial for node in self._index.next_evicted(NEXT_EVICTED)),
            recent_hits=tuple(published.hits.recent(self._latency.now())),
            counters=self._counters(),
        )

    def _live(self, sequence: LiveSequence) -> Live:
        block = None if sequence.lease is None else _last_indexed(sequence.lease)
        node = None if block is None else self._index.node_of(block)
        request = sequence.request
        return Live(
            id=request.id if sequence.index == 0 else f"{request.id}#{sequence.index}",
            namespace=sequence.namespace,
            state=self._state(sequence),
            prompt_tokens=sequence.prompt_tokens,
            cached_tokens=sequence.cached_tokens,
            computed_tokens=sequence.computed_tokens,
            output_tokens=sequence.output_tokens,
            node=None if node is None else node.serial,
            has_all=node is not None and node.blocks[-1] == block,
        )

    def _state(self, sequence: LiveSequence) -> RequestState:
        match self._scheduler.wait_reason(sequence):
            case None:
                return "running"
            case WaitReason.DISK:
                return "loading"
            case _:
                return "waiting"

    def _counters(self) -> tuple[int, int, int, int, int, float]:
        counters, cached = self._scheduler.counters, self._scheduler.admission_counters
        return (
            counters.computed_prompt_tokens + cached.cached_prompt_tokens,
            cached.cached_prompt_tokens,
            counters.generated_tokens,
            self._scheduler.store.counters.evictions,
            self._latency.first_tokens,
            self._latency.first_token_seconds,
        )


def _last_indexed(lease: Lease) -> BlockId | None:
    return lease.table[lease.indexed_blocks - 1] if lease.indexed_blocks else None


def _slots(group: Group) -> GroupSlots:
    stats = group.stats()
    window = group.window if isinstance(group, WindowGroup) else None
    kind = "recurrent" if window is None else "window"
    return GroupSlots(kind, window, stats.total, stats.total - stats.free)


def _states(groups: Sequence[Group]) -> Mapping[BlockId, tuple[int, ...]]:
    """There is one kind of recurrent layers at most."""
    for group in groups:
        if isinstance(group, RecurrentGroup):
            return {b: tuple(group.slots.attached_to(b)) for b in group.slots.blocks()}
    return {}
