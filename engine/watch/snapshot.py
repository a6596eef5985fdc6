"""The data that the engine thread copies between two steps for a snapshot of the cache.

The cost grows with the nodes that are shown, the live sequences and the slots of windows and states
in use. It does not grow with the depth of the tree, and a tree that has not changed is not walked.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain, groupby, islice
from time import thread_time

from engine.core.namespace_ids import namespace_id
from engine.core.scheduler import Scheduler
from engine.core.sequence import LiveSequence
from engine.core.statistics import saved_bytes
from engine.values.stats import RecentHits, RequestInfo
from engine.values.tree import IMAGE, HiddenRequests, NodeTokens, TreeArena, TreeCounters, TreeGroup
from kvstore.node import Node
from kvstore.recurrent import RecurrentGroup
from kvstore.sizes import StorageBytes
from kvstore.slots import Group, GroupStats
from kvstore.snapshot import EMPTY, AdoptionView, TreeView, adoption_views, tree_view
from kvstore.tokens import CONTENT_ID
from kvstore.tree import RadixTree
from kvstore.types import BlockId
from kvstore.window import WindowGroup

SHOWN_NODES = 580
"""The most nodes of a snapshot: more would not fit into its bytes."""

SHOWN_REQUESTS = 128
NEXT_EVICTED = 8


def request_infos(scheduler: Scheduler, most: int | None = None) -> tuple[RequestInfo, ...]:
    """The running sequences and then the waiting ones, at most `most`. For the engine thread."""
    live = islice(chain(scheduler.running, scheduler.waiting), most)
    return tuple(_request_info(scheduler, sequence) for sequence in live)


def _request_info(scheduler: Scheduler, sequence: LiveSequence) -> RequestInfo:
    last = _last_indexed(scheduler.store.tree, sequence)
    return RequestInfo(
        request_id=sequence.request.id,
        index=sequence.index,
        waits_for=scheduler.wait_reason(sequence),
        prompt_tokens=sequence.prompt_tokens,
        cached_tokens=sequence.cached_tokens,
        computed_tokens=sequence.computed_tokens,
        output_tokens=sequence.output_tokens,
        blocks=len(sequence.lease.table) if sequence.lease else 0,
        accepted_draft_tokens=sequence.usage.accepted_draft_tokens,
        namespace=namespace_id(sequence.namespace),
        node=None if last is None else last[1].serial,
    )


def _last_indexed(tree: RadixTree | None, sequence: LiveSequence) -> tuple[BlockId, Node] | None:
    """The last indexed block of a sequence, with its node. None if there is no such block."""
    lease = sequence.lease
    if tree is None or lease is None or not lease.indexed_blocks:
        return None
    block = lease.table[lease.indexed_blocks - 1]
    node = tree.node_of(block)
    return None if node is None else (block, node)


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The cache and the live sequences at one moment, as copied by the engine thread.

    `tree` is the same object as in the copy before if no node of the tree has changed. Two copies
    are equal if they differ in ages alone.
    """

    seconds: float = field(compare=False)  # of the tree's clock
    tree: TreeView
    adoptions: tuple[AdoptionView, ...] = field(compare=False)
    requests: tuple[RequestInfo, ...]
    hidden_requests: HiddenRequests
    arena: TreeArena
    groups: tuple[TreeGroup, ...]
    windows: tuple[frozenset[BlockId], ...]  # for each window, the blocks with a slot attached
    states: Mapping[BlockId, tuple[int, ...]]  # for each block, the tokens at which it has a state
    next_evicted: tuple[int, ...]
    recent_hits: tuple[RecentHits, ...]
    counters: TreeCounters
    cost_seconds: float = field(default=0.0, compare=False)  # of the engine thread


ADDED_UP_NODES = 4_000
"""How many nodes of the tree are added up between two steps, which takes about 4 ms on two CPU
cores."""


class SnapshotTaker:
    """Copies the cache. Its methods are for the engine thread."""

    def __init__(
        self, scheduler: Scheduler, sizes: StorageBytes, most_nodes: int = SHOWN_NODES
    ) -> None:
        self._scheduler = scheduler
        self._sizes = sizes
        self._most_nodes = most_nodes
        self._tree = scheduler.store.tree
        self._n_changes = -1
        self._holders = Counter[Node]()
        self._view = EMPTY

    def prepare(self) -> bool:
        """Do some of the work that the tree's changes have made, so that no step waits for all of
        it. Returns whether `take` has little left to do.
        """
        return self._tree is None or self._tree.add_up(ADDED_UP_NODES)

    def take(self) -> EngineSnapshot:
        """Copy the cache as it is now. A tree that has not changed is not walked again."""
        began_seconds = thread_time()
        scheduler, tree, metrics = self._scheduler, self._tree, self._scheduler.metrics
        holders = self._count_holders()
        if tree is not None and (tree.n_changes != self._n_changes or holders != self._holders):
            self._n_changes, self._holders = tree.n_changes, holders
            self._view = tree_view(tree, holders, self._most_nodes)
        requests = request_infos(scheduler, SHOWN_REQUESTS)
        n_running = sum(request.state == "running" for request in requests)
        hidden_running = len(scheduler.running) - n_running
        hidden_waiting = len(scheduler.waiting) - (len(requests) - n_running)
        pool, groups = scheduler.store.pool, scheduler.store.groups
        stats = [group.stats() for group in groups]
        evicted = () if tree is None else tree.next_evicted(NEXT_EVICTED)
        return EngineSnapshot(
            seconds=metrics.now(),
            tree=self._view,
            adoptions=() if tree is None else adoption_views(tree),
            requests=requests,
            hidden_requests=HiddenRequests(running=hidden_running, waiting=hidden_waiting),
            arena=TreeArena(
                blocks=pool.n_blocks,
                free=pool.n_free,
                cached=pool.n_evictable,
                held=pool.n_referenced,
                saved_bytes=saved_bytes(pool.n_saved, stats, self._sizes),
                block_bytes=self._sizes.block,
            ),
            groups=tuple(map(_group_slots, groups, stats)),
            windows=tuple(g.slots.blocks() for g in groups if isinstance(g, WindowGroup)),
            states={  # there is at most one group of recurrent layers
                block: tuple(group.slots.attached_to(block))
                for group in groups
                if isinstance(group, RecurrentGroup)
                for block in group.slots.blocks()
            },
            next_evicted=tuple(node.serial for node in evicted),
            recent_hits=metrics.recent_hits(),
            counters=self._counters(),
            cost_seconds=thread_time() - began_seconds,
        )

    def node(self, serial: int, most_tokens: int) -> NodeTokens | None:
        """The first `most_tokens` tokens of a node that is shown; None if there is no such node.

        The tree is walked only for a node that the last copy does not have.
        """
        node = self._shown_node(serial)
        if node is None:
            self.take()
            node = self._shown_node(serial)
        if node is None:
            return None
        ids = (min(each, CONTENT_ID) for each in node.token_ids(most_tokens))
        shown = (
            (IMAGE,) if token_id == CONTENT_ID else tuple(run) for token_id, run in groupby(ids)
        )
        return NodeTokens(serial, node.n_tokens, tuple(chain.from_iterable(shown)))

    def _shown_node(self, serial: int) -> Node | None:
        """The node of the tree with this serial, if the last copy has it."""
        view = next((view for view in self._view.nodes if view.serial == serial), None)
        node = None if view is None or self._tree is None else self._tree.node_of(view.blocks[0])
        return node if node is not None and node.serial == serial else None

    def _count_holders(self) -> Counter[Node]:
        """For each node in use, how many running sequences hold its last block; 0 if only blocks
        before the last are held.
        """
        holders = Counter[Node]()
        for sequence in self._scheduler.running:
            if (last := _last_indexed(self._tree, sequence)) is None:
                continue
            block, node = last
            holders.update(node.path())
            if node.blocks[-1] != block:
                holders[node] -= 1
        return holders

    def _counters(self) -> TreeCounters:
        metrics = self._scheduler.metrics
        return TreeCounters(
            prompt_tokens=metrics.computed_prompt_tokens + metrics.cached_prompt_tokens,
            cached_tokens=metrics.cached_prompt_tokens,
            generated_tokens=metrics.generated_tokens,
            evictions=self._scheduler.store.counters.evictions,
            requests=metrics.received,
            first_tokens=metrics.first_token_seconds.count,
            first_token_seconds=round(metrics.first_token_seconds.total, 4),
        )


def _group_slots(group: Group, stats: GroupStats) -> TreeGroup:
    used = stats.total - stats.free
    if isinstance(group, WindowGroup):
        return TreeGroup("window", group.window, stats.total, used)
    return TreeGroup("recurrent", None, stats.total, used)
