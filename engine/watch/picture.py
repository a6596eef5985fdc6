"""Draws pictures of the cache from snapshots, on a worker thread."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from time import thread_time
from types import MappingProxyType
from typing import Any

from engine.core.scheduler import Scheduler
from engine.disk_cache.cache import DiskCache
from engine.values.picture import (
    CachePicture,
    Hidden,
    NodeTokens,
    PictureAdoption,
    PictureNamespace,
    PictureNode,
)
from engine.values.stats import DiskCacheStats
from engine.watch.snapshot import Snapshot, SnapshotTaker, namespace_id
from kvstore.sizes import StorageBytes
from kvstore.snapshot import NodeView, TreeView
from kvstore.types import BlockId, Namespace

MAX_MARKS = 32
"""The most saved states, and the most holes, that are shown on one node: the last ones."""

ADAPTER_CHARACTERS = 24
"""The most characters of an adapter's name in the name of a namespace."""

ADOPTED_SECONDS = 5.0
"""How long an adoption is shown."""

PICTURE_BYTES = 147_800
"""The most bytes of a picture as JSON. The following sizes are the most that its parts take."""
NODE_BYTES = 255
REQUEST_BYTES = 260
ADOPTION_BYTES = 60
NAMESPACE_BYTES = 130
STATE_BYTES = 9
HOLE_BYTES = 19


class Renderer:
    """Draws the snapshot that was applied last. Not thread-safe."""

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
        self._last: Snapshot | None = None
        self._disk_stats: DiskCacheStats | None = None

    def apply(self, snapshot: Snapshot) -> bool:
        """Take the snapshot. Returns whether anything differs from the one before."""
        last, self._last = self._last, snapshot
        disk, self._disk_stats = self._disk_stats, self._disk.stats() if self._disk else None
        if last is None or last.tree is not snapshot.tree:
            return True
        return last != snapshot or disk != self._disk_stats

    def first_block(self, node_id: int) -> tuple[int, BlockId] | None:
        """The number of tokens and the first block of a node that is shown."""
        nodes = () if self._last is None else self._last.tree.nodes
        node = next((node for node in nodes if node.serial == node_id), None)
        return None if node is None else (node.n_tokens, node.blocks[0])

    def render(self, version: int) -> CachePicture:
        """A picture of the last snapshot."""
        snapshot = self._last
        assert snapshot is not None, "no snapshot has been applied"
        shown = self._shown(snapshot)
        names = {node.namespace: namespace_id(node.namespace) for node in shown}
        hidden = _hidden(snapshot.tree, shown)
        places = {serial: place for place, serial in enumerate(snapshot.next_evicted, start=1)}
        serials = {node.serial for node in shown}
        return CachePicture(
            version=version,
            time=time.time(),
            block_tokens=self._block_size,
            arena=snapshot.arena,
            groups=snapshot.groups,
            disk=self._disk_stats,
            nodes=tuple(
                PictureNode(
                    id=node.serial,
                    parent=node.parent,
                    namespace=names[node.namespace],
                    start=node.start,
                    tokens=node.n_tokens,
                    disk_tokens=self._disk_tokens(node),
                    blocks=len(node.blocks),
                    tail=node.n_tokens % self._block_size,
                    holders=node.holders,
                    idle_seconds=round(max(snapshot.seconds - node.last_used, 0.0), 1),
                    states=self._states(node, snapshot),
                    holes=self._holes(node, snapshot),
                    next_evicted=places.get(node.serial),
                    hidden=hidden[node.serial] if hidden[node.serial].nodes else None,
                )
                for node in shown
            ),
            hidden=hidden[None],
            namespaces=tuple(
                self._namespace(namespace, name, *snapshot.tree.namespaces[namespace])
                for namespace, name in sorted(names.items(), key=lambda item: item[1])
            ),
            requests=snapshot.requests,
            hidden_requests=snapshot.hidden_requests,
            adoptions=tuple(_adoptions(snapshot, serials)),
            recent_hits=snapshot.recent_hits,
            counters=snapshot.counters,
        )

    def _shown(self, snapshot: Snapshot) -> Sequence[NodeView]:
        """The first nodes of the snapshot, as many as fit into the picture's bytes."""
        namespaces = set[Namespace]()
        room = PICTURE_BYTES - len(snapshot.requests) * REQUEST_BYTES
        room -= len(snapshot.adoptions) * ADOPTION_BYTES
        for n_shown, node in enumerate(snapshot.tree.nodes):
            room -= NODE_BYTES
            if node.namespace not in namespaces:
                namespaces.add(node.namespace)
                room -= NAMESPACE_BYTES
            room -= STATE_BYTES * len(self._states(node, snapshot))
            room -= HOLE_BYTES * len(self._holes(node, snapshot))
            if room < 0:
                return snapshot.tree.nodes[:n_shown]
        return snapshot.tree.nodes

    def _disk_tokens(self, node: NodeView) -> int:
        if self._disk is None:
            return 0
        return min(self._disk.on_disk(node.hashes) * self._block_size, node.n_tokens)

    def _states(self, node: NodeView, snapshot: Snapshot) -> tuple[int, ...]:
        if not snapshot.states or snapshot.states.keys().isdisjoint(node.blocks):
            return ()
        found = [
            node.start + index * self._block_size + n_tokens
            for index, block in enumerate(node.blocks)
            for n_tokens in snapshot.states.get(block, ())
        ]
        return tuple(sorted(found)[-MAX_MARKS:])

    def _namespace(
        self, namespace: Namespace, name: str, nodes: int, tokens: int
    ) -> PictureNamespace:
        """The namespace with the id `name`. The salt itself is not shown."""
        adapter = self._adapters.get(namespace.adapter, "")
        parts = [f"adapter {adapter[:ADAPTER_CHARACTERS]}"] if adapter else []
        parts += [f"salted {name[:8]}"] if namespace.cache_salt else []
        return PictureNamespace(name, ", ".join(parts) or "default", nodes, tokens)

    def _holes(self, node: NodeView, snapshot: Snapshot) -> tuple[tuple[int, int], ...]:
        """Runs of tokens whose blocks are missing from at least one window."""
        windows = snapshot.windows
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


def _adoptions(snapshot: Snapshot, shown: Set[int]) -> Iterator[PictureAdoption]:
    """The latest adoptions. A node that is not shown is replaced by its nearest shown ancestor."""
    for adoption in snapshot.adoptions:
        seconds = snapshot.seconds - adoption.seconds
        node = next((serial for serial in adoption.path if serial in shown), None)
        if node is not None and seconds <= ADOPTED_SECONDS:
            yield PictureAdoption(node, adoption.n_tokens, round(max(seconds, 0.0), 2))


def _hidden(tree: TreeView, shown: Sequence[NodeView]) -> dict[int | None, Hidden]:
    """For each shown node, and with None for the roots, what is left out below it."""
    left: dict[int | None, Hidden] = {None: Hidden(tree.n_nodes, tree.n_tokens, tree.n_blocks)}
    for node in shown:
        subtree = Hidden(node.subtree_nodes, node.subtree_tokens, node.subtree_blocks)
        left[node.parent] = left[node.parent].less(subtree)
        left[node.serial] = subtree.less(Hidden(1, node.n_tokens, len(node.blocks)))
    return left


Ask = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Calls a function on the engine thread between two steps. Raises EngineStopped."""


class LiveWatch:
    """Implements `engine.api.CacheWatch`. For one task at a time."""

    def __init__(
        self, ask: Ask, scheduler: Scheduler, sizes: StorageBytes, versions: Iterator[int]
    ) -> None:
        """`sizes` are those of the scheduler's store; `versions` number the pictures."""
        self._ask = ask
        self._snapshots = SnapshotTaker(scheduler, sizes)
        self._renderer = Renderer(
            scheduler.store.block_size, scheduler.disk, scheduler.namespaces.fingerprints
        )
        self._versions = versions
        self._version = next(versions)
        self._snapshot_seconds = 0.0

    async def look(self) -> int:
        snapshot = await self._ask(self._snapshots.take)
        self._snapshot_seconds = snapshot.cost_seconds
        if await asyncio.to_thread(self._renderer.apply, snapshot):
            self._version = next(self._versions)
        return self._version

    async def picture(self) -> CachePicture:
        return await asyncio.to_thread(self._rendered)

    def _rendered(self) -> CachePicture:
        began_seconds = thread_time()
        picture = self._renderer.render(self._version)
        cost_seconds = thread_time() - began_seconds + self._snapshot_seconds
        return replace(picture, cost_seconds=cost_seconds)

    async def node(self, node_id: int, most_tokens: int) -> NodeTokens | None:
        await self.look()
        found = self._renderer.first_block(node_id)
        if found is None:
            return None
        n_tokens, block = found
        token_ids = await self._ask(partial(self._snapshots.token_ids, node_id, block, most_tokens))
        return None if token_ids is None else NodeTokens(node_id, n_tokens, token_ids)
