"""Snapshots of the cache, and what has changed since an earlier one. A worker thread makes them
from the engine thread's copies.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from time import thread_time
from types import MappingProxyType
from typing import Any, cast

from engine.core.namespace_ids import namespace_id
from engine.core.scheduler import Scheduler
from engine.disk_cache.cache import DiskCache
from engine.values.stats import DiskCacheStats
from engine.values.tree import (
    HiddenNodes,
    NodeTokens,
    TreeAdoption,
    TreeChanges,
    TreeNamespace,
    TreeNode,
    TreeSnapshot,
)
from engine.watch.snapshot import EngineSnapshot, SnapshotTaker
from kvstore.sizes import StorageBytes
from kvstore.snapshot import NodeView, TreeView
from kvstore.types import Namespace

IDLE_SECONDS = 5.0
"""Seconds without a poll after which a feed forgets its last snapshot."""

MAX_MARKS = 32
"""The most saved states, and the most holes, that are shown of one node: the last ones."""

ADAPTER_CHARACTERS = 24
"""The most characters of an adapter's name in the name of a namespace."""

ADOPTED_SECONDS = 5.0
"""How long an adoption is shown."""

SNAPSHOT_BYTES = 147_800
"""The most bytes of a snapshot as JSON. The following sizes are the most that its parts take."""
NODE_BYTES = 255
REQUEST_BYTES = 260
ADOPTION_BYTES = 60
NAMESPACE_BYTES = 130
STATE_BYTES = 9
HOLE_BYTES = 19


@dataclass(frozen=True, slots=True)
class Rendered:
    """A snapshot with the copy that it was made from."""

    copy: EngineSnapshot
    snapshot: TreeSnapshot


class Renderer:
    """Makes snapshots of the cache from the engine thread's copies. For any thread."""

    def __init__(
        self,
        block_size: int,
        disk: DiskCache | None,
        fingerprints: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`fingerprints`: those of the adapters, by their names."""
        self._adapters = {fingerprint: name for name, fingerprint in fingerprints.items()}
        self._block_size = block_size
        self._disk = disk
        self._versions = count(1)

    def render(self, copy: EngineSnapshot, before: Rendered | None = None) -> Rendered:
        """Make a snapshot. It has a new version unless it differs from `before` in ages alone."""
        began_seconds = thread_time()
        disk = self._disk.stats() if self._disk else None
        if before is not None and _is_same(copy, disk, before):
            snapshot = before.snapshot
        else:
            snapshot = self._snapshot(copy, disk)
        snapshot = replace(
            snapshot,
            time=time.time(),
            seconds=copy.seconds,
            adoptions=tuple(_adoptions(copy, {node.id for node in snapshot.nodes})),
            cost_seconds=thread_time() - began_seconds + copy.cost_seconds,
        )
        return Rendered(copy, snapshot)

    def _snapshot(self, copy: EngineSnapshot, disk: DiskCacheStats | None) -> TreeSnapshot:
        """A snapshot without its ages."""
        shown = self._shown(copy)
        names = {node.namespace: namespace_id(node.namespace) for node in shown}
        hidden = _hidden(copy.tree, shown)
        places = {serial: place for place, serial in enumerate(copy.next_evicted, start=1)}
        return TreeSnapshot(
            version=next(self._versions),
            time=0.0,
            seconds=0.0,
            block_tokens=self._block_size,
            arena=copy.arena,
            groups=copy.groups,
            disk=disk,
            nodes=tuple(
                TreeNode(
                    id=node.serial,
                    parent=node.parent,
                    namespace=names[node.namespace],
                    start=node.start,
                    tokens=node.n_tokens,
                    disk_tokens=self._disk_tokens(node),
                    blocks=len(node.blocks),
                    tail=node.n_tokens % self._block_size,
                    holders=node.holders,
                    used_seconds=None if math.isinf(node.last_used) else node.last_used,
                    states=self._states(node, copy),
                    holes=self._holes(node, copy),
                    next_evicted=places.get(node.serial),
                    hidden=hidden[node.serial] if hidden[node.serial].nodes else None,
                )
                for node in shown
            ),
            hidden=hidden[None],
            namespaces=tuple(
                self._namespace(namespace, name, *copy.tree.namespaces[namespace])
                for namespace, name in sorted(names.items(), key=lambda item: item[1])
            ),
            requests=copy.requests,
            hidden_requests=copy.hidden_requests,
            adoptions=(),
            recent_hits=copy.recent_hits,
            counters=copy.counters,
        )

    def _shown(self, copy: EngineSnapshot) -> Sequence[NodeView]:
        """The first nodes of the copy, as many as fit into SNAPSHOT_BYTES."""
        namespaces = set[Namespace]()
        room = SNAPSHOT_BYTES - len(copy.requests) * REQUEST_BYTES
        room -= len(copy.adoptions) * ADOPTION_BYTES
        for n_shown, node in enumerate(copy.tree.nodes):
            room -= NODE_BYTES
            if node.namespace not in namespaces:
                namespaces.add(node.namespace)
                room -= NAMESPACE_BYTES
            room -= STATE_BYTES * len(self._states(node, copy))
            room -= HOLE_BYTES * len(self._holes(node, copy))
            if room < 0:
                return copy.tree.nodes[:n_shown]
        return copy.tree.nodes

    def _disk_tokens(self, node: NodeView) -> int:
        if self._disk is None:
            return 0
        return min(self._disk.on_disk(node.hashes) * self._block_size, node.n_tokens)

    def _states(self, node: NodeView, copy: EngineSnapshot) -> tuple[int, ...]:
        if not copy.states or copy.states.keys().isdisjoint(node.blocks):
            return ()
        found = [
            node.start + index * self._block_size + n_tokens
            for index, block in enumerate(node.blocks)
            for n_tokens in copy.states.get(block, ())
        ]
        return tuple(sorted(found)[-MAX_MARKS:])

    def _namespace(self, namespace: Namespace, name: str, nodes: int, tokens: int) -> TreeNamespace:
        """The namespace with the id `name`. Its salt is not shown."""
        adapter = self._adapters.get(namespace.adapter, "")
        parts = [f"adapter {adapter[:ADAPTER_CHARACTERS]}"] if adapter else []
        parts += [f"salted {name[:8]}"] if namespace.cache_salt else []
        return TreeNamespace(name, ", ".join(parts) or "default", nodes, tokens)

    def _holes(self, node: NodeView, copy: EngineSnapshot) -> tuple[tuple[int, int], ...]:
        """Runs of tokens whose blocks are missing from at least one window."""
        windows = copy.windows
        if all(window.issuperset(node.blocks) for window in windows):
            return ()
        runs = list[tuple[int, int]]()
        for index, block in enumerate(node.blocks):
            if all(block in window for window in windows):
                continue
            first = index * self._block_size
            end = min(first + self._block_size, node.n_tokens)
            if runs and runs[-1][1] == first:
                first = runs.pop()[0]
            runs.append((first, end))
        return tuple((node.start + first, node.start + end) for first, end in runs[-MAX_MARKS:])


def _adoptions(copy: EngineSnapshot, shown: Set[int]) -> Iterator[TreeAdoption]:
    """The latest adoptions. A node that is not shown is replaced by its nearest shown ancestor."""
    for adoption in copy.adoptions:
        seconds = copy.seconds - adoption.seconds
        node = next((serial for serial in adoption.path if serial in shown), None)
        if node is not None and seconds <= ADOPTED_SECONDS:
            yield TreeAdoption(node, adoption.n_tokens, round(max(seconds, 0.0), 2))


def _hidden(tree: TreeView, shown: Sequence[NodeView]) -> dict[int | None, HiddenNodes]:
    """For each shown node, and for the roots under None, the nodes below it that are left out."""
    left: dict[int | None, HiddenNodes] = {
        None: HiddenNodes(tree.n_nodes, tree.n_tokens, tree.n_blocks)
    }
    for node in shown:
        subtree = HiddenNodes(node.subtree_nodes, node.subtree_tokens, node.subtree_blocks)
        left[node.parent] = left[node.parent].less(subtree)
        left[node.serial] = subtree.less(HiddenNodes(1, node.n_tokens, len(node.blocks)))
    return left


def _is_same(copy: EngineSnapshot, disk: DiskCacheStats | None, before: Rendered) -> bool:
    """Whether nothing but ages has changed. The copies' trees are not compared node by node: an
    unchanged tree is the same object.
    """
    is_same_tree = copy.tree is before.copy.tree
    return is_same_tree and copy == before.copy and disk == before.snapshot.disk


Ask = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Calls a function on the engine thread between two steps. Raises EngineStopped."""


class TreeFeed:
    """Snapshots of the cache for a caller that polls. Without polls it does nothing and holds
    nothing. For one event loop.
    """

    def __init__(self, ask: Ask, scheduler: Scheduler, sizes: StorageBytes) -> None:
        """`sizes` are those of the scheduler's store."""
        self._ask = ask
        self._new_taker = partial(SnapshotTaker, scheduler, sizes)
        self._renderer = Renderer(
            scheduler.store.block_size, scheduler.disk, scheduler.namespaces.fingerprints
        )
        self._taker: SnapshotTaker | None = None
        self._last: Rendered | None = None
        self._forgetting: asyncio.TimerHandle | None = None

    async def tree(self, since: int) -> TreeSnapshot | TreeChanges:
        """See `engine.api.Engine.tree`."""
        taker = self._asked_taker()
        while not await self._ask(taker.prepare):
            continue
        copy = await self._ask(taker.take)
        last = self._last
        self._last = await asyncio.to_thread(self._renderer.render, copy, last)
        snapshot = self._last.snapshot
        if last is None or last.snapshot.version != since:
            return snapshot
        return TreeChanges.between(last.snapshot, snapshot)

    async def node(self, node_id: int, most_tokens: int) -> NodeTokens | None:
        """See `engine.api.Engine.node`."""
        found = await self._ask(partial(self._asked_taker().node, node_id, most_tokens))
        return cast(NodeTokens | None, found)

    def _asked_taker(self) -> SnapshotTaker:
        """The taker of this feed, which is kept for IDLE_SECONDS from now on."""
        if self._forgetting is not None:
            self._forgetting.cancel()
        self._forgetting = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._forget)
        if self._taker is None:
            self._taker = self._new_taker()
        return self._taker

    def _forget(self) -> None:
        self._taker = self._last = self._forgetting = None
