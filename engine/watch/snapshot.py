"""What the engine thread copies for a picture between two steps.

The cost grows with the nodes that are shown, the live sequences and the slots of windows and states
in use. It does not grow with the depth of the tree, and a tree that has not changed is not walked.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from time import thread_time

from engine.core.scheduler import Scheduler
from engine.core.sequence import LiveSequence
from engine.core.statistics import saved_bytes
from engine.values.picture import GroupSlots, RequestState
from engine.values.request import WaitReason
from engine.values.stats import RecentHits
from kvstore.recurrent import RecurrentGroup
from kvstore.sizes import StorageBytes
from kvstore.slots import Group
from kvstore.snapshot import EMPTY, AdoptionView, TreeView, adoption_views, tree_view
from kvstore.tokens import Digest, root_digest
from kvstore.tree import Node
from kvstore.types import BlockId, Namespace
from kvstore.window import WindowGroup

UNSALTED_ID = "0"


def namespace_id(namespace: Namespace) -> str:
    """The id of the namespace of an adapter or a salt; UNSALTED_ID for the model's own."""
    is_own = not (namespace.adapter or namespace.cache_salt)
    return UNSALTED_ID if is_own else _root_id(root_digest(namespace))


def find_namespace(name: str, namespaces: Iterable[Namespace]) -> Namespace | None:
    return next((each for each in namespaces if namespace_id(each) == name), None)


def find_root(name: str, roots: Iterable[Digest]) -> Digest | None:
    """Finds a namespace of which only the digest is known, such as a salted one on disk."""
    return next((root for root in roots if _root_id(root) == name), None)


def _root_id(root: Digest) -> str:
    return root.hex()[:12]


SHOWN_NODES = 580
"""The most nodes in a picture: more would not fit into its bytes."""

SHOWN_REQUESTS = 128
NEXT_EVICTED = 8


@dataclass(frozen=True, slots=True)
class Live:
    """A live sequence. `node` is the serial of the node with the last of its indexed blocks."""

    id: str
    namespace: Namespace
    state: RequestState
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    output_tokens: int
    node: int | None


@dataclass(frozen=True, slots=True)
class Moment:
    """Everything but the tree at one moment."""

    live: tuple[Live, ...]  # all running sequences, and the first waiting ones
    waiting: int
    blocks: tuple[int, int, int, int]  # in all, free, cached, held
    saved_bytes: int
    groups: tuple[GroupSlots, ...]
    windows: tuple[frozenset[BlockId], ...]  # for each window, the blocks with a slot attached
    states: Mapping[BlockId, tuple[int, ...]]  # for each block, the tokens at which it has a state
    next_evicted: tuple[int, ...]
    recent_hits: tuple[RecentHits, ...]
    counters: tuple[int, int, int, int, int, float]  # as in PictureCounters, without `requests`


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`tree` is the same object as in the snapshot before if no node of the tree has changed."""

    seconds: float  # of the tree's clock
    tree: TreeView
    adoptions: tuple[AdoptionView, ...]
    moment: Moment
    cost_seconds: float = 0.0  # of the engine thread


class SnapshotTaker:
    """Takes snapshots on the engine thread."""

    def __init__(
        self, scheduler: Scheduler, sizes: StorageBytes, most_nodes: int = SHOWN_NODES
    ) -> None:
        self._scheduler = scheduler
        self._metrics = scheduler.metrics
        self._sizes = sizes
        self._most_nodes = most_nodes
        self._tree = scheduler.store.tree
        self._n_changes = -1
        self._holders = Counter[Node]()
        self._view = EMPTY

    def take(self) -> Snapshot:
        began_seconds, tree = thread_time(), self._tree
        holders = self._count_holders()
        if tree is not None and (tree.n_changes != self._n_changes or holders != self._holders):
            self._n_changes, self._holders = tree.n_changes, holders
            self._view = tree_view(tree, holders, self._most_nodes)
        adoptions = () if tree is None else adoption_views(tree)
        moment, now = self._moment(), self._metrics.now()
        return Snapshot(now, self._view, adoptions, moment, thread_time() - began_seconds)

    def token_ids(self, serial: int, block: BlockId, most_tokens: int) -> tuple[int, ...] | None:
        """The first tokens of a node, or None if the block is no longer in that node."""
        node = None if self._tree is None else self._tree.node_of(block)
        if node is None or node.serial != serial:
            return None
        return node.token_ids(most_tokens)

    def _count_holders(self) -> Counter[Node]:
        """For each node in use, how many running sequences hold its last block; 0 if only blocks
        before the last are held.
        """
        holders = Counter[Node]()
        for sequence in self._scheduler.running:
            if (last := self._last_indexed(sequence)) is None:
                continue
            block, node = last
            holders.update(node.path())
            if node.blocks[-1] != block:
                holders[node] -= 1
        return holders

    def _last_indexed(self, sequence: LiveSequence) -> tuple[BlockId, Node] | None:
        lease = sequence.lease
        if lease is None or not lease.indexed_blocks or self._tree is None:
            return None
        block = lease.table[lease.indexed_blocks - 1]
        node = self._tree.node_of(block)
        return None if node is None else (block, node)

    def _moment(self) -> Moment:
        scheduler, store = self._scheduler, self._scheduler.store
        waiting = islice(scheduler.waiting, SHOWN_REQUESTS)
        pool, groups = store.pool, store.groups
        evicted = () if self._tree is None else self._tree.next_evicted(NEXT_EVICTED)
        return Moment(
            live=tuple(map(self._live, (*scheduler.running, *waiting))),
            waiting=len(scheduler.waiting),
            blocks=(pool.n_blocks, pool.n_free, pool.n_evictable, pool.n_referenced),
            saved_bytes=saved_bytes(store, self._sizes),
            groups=tuple(_slots(group) for group in groups),
            windows=tuple(g.slots.blocks() for g in groups if isinstance(g, WindowGroup)),
            states=_states(groups),
            next_evicted=tuple(node.serial for node in evicted),
            recent_hits=self._metrics.recent_hits(),
            counters=self._counters(),
        )

    def _live(self, sequence: LiveSequence) -> Live:
        request, last = sequence.request, self._last_indexed(sequence)
        return Live(
            id=request.id if sequence.index == 0 else f"{request.id}#{sequence.index}",
            namespace=sequence.namespace,
            state=self._state(sequence),
            prompt_tokens=sequence.prompt_tokens,
            cached_tokens=sequence.cached_tokens,
            computed_tokens=sequence.computed_tokens,
            output_tokens=sequence.output_tokens,
            node=None if last is None else last[1].serial,
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
        metrics = self._metrics
        return (
            metrics.computed_prompt_tokens + metrics.cached_prompt_tokens,
            metrics.cached_prompt_tokens,
            metrics.generated_tokens,
            self._scheduler.store.counters.evictions,
            metrics.first_token_seconds.count,
            metrics.first_token_seconds.sum_seconds,
        )


def _slots(group: Group) -> GroupSlots:
    stats = group.stats()
    window = group.window if isinstance(group, WindowGroup) else None
    kind = "recurrent" if window is None else "window"
    return GroupSlots(kind, window, stats.total, stats.total - stats.free)


def _states(groups: Sequence[Group]) -> Mapping[BlockId, tuple[int, ...]]:
    """There is at most one group of recurrent layers."""
    for group in groups:
        if isinstance(group, RecurrentGroup):
            return {b: tuple(group.slots.attached_to(b)) for b in group.slots.blocks()}
    return {}
