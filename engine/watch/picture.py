"""Draws pictures of the cache from snapshots, on a worker thread."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from time import thread_time
from types import MappingProxyType
from typing import Any

from engine.disk_cache.cache import DiskCache
from engine.values.picture import (
    ArenaBlocks,
    CachePicture,
    DiskUse,
    Hidden,
    HiddenRequests,
    NodeTokens,
    PictureAdoption,
    PictureCounters,
    PictureNamespace,
    PictureNode,
    PictureRequest,
)
from engine.watch.snapshot import (
    SHOWN_REQUESTS,
    Live,
    Moment,
    Snapshot,
    SnapshotTaker,
    namespace_id,
)
from kvstore.snapshot import NodeView, TreeView
from kvstore.types import BlockId, Namespace

MAX_MARKS = 32
"""How many saved states, and how many holes, are shown on one node: the last ones."""

ADAPTER_CHARACTERS = 24
"""How much of an adapter's name is shown in the name of a namespace."""

ADOPTED_SECONDS = 5.0
"""How long an adoption is shown."""

PICTURE_BYTES = 147_800
"""The most bytes of a picture as JSON, by the following sizes: the most that its parts take."""
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
        block_bytes: int,
        disk: DiskCache | None,
        adapters: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`adapters`: their names by their fingerprints."""
        self._adapters = adapters
        self._block_size = block_size
        self._block_bytes = block_bytes
        self._last: Snapshot | None = None
        self._disk = disk
        self._disk_use: DiskUse | None = None

    def apply(self, snapshot: Snapshot) -> bool:
        """Take the snapshot. Returns whether anything differs from the one before."""
        last, self._last = self._last, snapshot
        used, self._disk_use = self._disk_use, _disk_use(self._disk)
        if last is None or last.tree is not snapshot.tree:
            return True
        return last.moment != snapshot.moment or used != self._disk_use

    def first_block(self, node_id: int) -> tuple[int, BlockId] | None:
        """The number of tokens and the first block of a node that is shown."""
        nodes = () if self._last is None else self._last.tree.nodes
        node = next((node for node in nodes if node.serial == node_id), None)
        return None if node is None else (node.n_tokens, node.blocks[0])

    def render(self, version: int, requests: int) -> CachePicture:
        """A picture of the last snapshot. `requests`: sequences requested since start."""
        snapshot = self._last
        assert snapshot is not None, "no snapshot has been applied"
        moment = snapshot.moment
        shown = self._shown(snapshot)
        names = {node.namespace: namespace_id(node.namespace) for node in shown}
        hidden = _hidden(snapshot.tree, shown)
        places = {serial: place for place, serial in enumerate(moment.next_evicted, start=1)}
        serials = {node.serial for node in shown}
        return CachePicture(
            version=version,
            time=time.time(),
            block_tokens=self._block_size,
            arena=ArenaBlocks(*moment.blocks, moment.saved_bytes, self._block_bytes),
            groups=moment.groups,
            disk=self._disk_use,
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
                    states=self._states(node, moment),
                    holes=self._holes(node, moment),
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
            requests=tuple(map(_request, moment.live[:SHOWN_REQUESTS])),
            hidden_requests=_hidden_requests(moment),
            adoptions=tuple(_adoptions(snapshot, serials)),
            recent_hits=moment.recent_hits,
            counters=_counters(moment, requests),
        )

    def _shown(self, snapshot: Snapshot) -> Sequence[NodeView]:
        """The first nodes of the snapshot, as many as fit into the picture's bytes."""
        moment, namespaces = snapshot.moment, set[Namespace]()
        room = PICTURE_BYTES - len(moment.live[:SHOWN_REQUESTS]) * REQUEST_BYTES
        room -= len(snapshot.adoptions) * ADOPTION_BYTES
        for n_shown, node in enumerate(snapshot.tree.nodes):
            room -= NODE_BYTES
            if node.namespace not in namespaces:
                namespaces.add(node.namespace)
                room -= NAMESPACE_BYTES
            room -= STATE_BYTES * len(self._states(node, moment))
            room -= HOLE_BYTES * len(self._holes(node, moment))
            if room < 0:
                return snapshot.tree.nodes[:n_shown]
        return snapshot.tree.nodes

    def _disk_tokens(self, node: NodeView) -> int:
        if self._disk is None:
            return 0
        return min(self._disk.on_disk(node.hashes) * self._block_size, node.n_tokens)

    def _states(self, node: NodeView, moment: Moment) -> tuple[int, ...]:
        if not moment.states or moment.states.keys().isdisjoint(node.blocks):
            return ()
        found = [
            node.start + index * self._block_size + n_tokens
            for index, block in enumerate(node.blocks)
            for n_tokens in moment.states.get(block, ())
        ]
        return tuple(sorted(found)[-MAX_MARKS:])

    def _namespace(
        self, namespace: Namespace, name: str, nodes: int, tokens: int
    ) -> PictureNamespace:
        adapter = self._adapters.get(namespace.adapter, "")
        title = _title(name, adapter, namespace.cache_salt)
        return PictureNamespace(name, title, nodes, tokens)

    def _holes(self, node: NodeView, moment: Moment) -> tuple[tuple[int, int], ...]:
        """Runs of tokens whose blocks are missing from at least one window."""
        if not moment.windows or all(window.issuperset(node.blocks) for window in moment.windows):
            return ()
        runs = list[tuple[int, int]]()
        for index, block in enumerate(node.blocks):
            if all(block in window for window in moment.windows):
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


def _title(name: str, adapter: str, cache_salt: str) -> str:
    """The name of the namespace with the id `name`. The salt itself is not shown."""
    parts = [f"adapter {adapter[:ADAPTER_CHARACTERS]}"] if adapter else []
    parts += [f"salted {name[:8]}"] if cache_salt else []
    return ", ".join(parts) or "default"


def _hidden(tree: TreeView, shown: Sequence[NodeView]) -> dict[int | None, Hidden]:
    """For each shown node, and with None for the roots, what is left out below it."""
    left: dict[int | None, tuple[int, int, int]] = {
        None: (tree.n_nodes, tree.n_tokens, tree.n_blocks)
    }
    for node in shown:
        subtree = node.subtree_nodes, node.subtree_tokens, node.subtree_blocks
        left[node.parent] = _less(left[node.parent], subtree)
        left[node.serial] = _less(subtree, (1, node.n_tokens, len(node.blocks)))
    return {serial: Hidden(*weight) for serial, weight in left.items()}


def _less(weight: tuple[int, int, int], other: tuple[int, int, int]) -> tuple[int, int, int]:
    return weight[0] - other[0], weight[1] - other[1], weight[2] - other[2]


def _request(live: Live) -> PictureRequest:
    return PictureRequest(
        id=live.id,
        node=live.node,
        namespace=namespace_id(live.namespace),
        state=live.state,
        prompt_tokens=live.prompt_tokens,
        cached_tokens=live.cached_tokens,
        computed_tokens=live.computed_tokens,
        output_tokens=live.output_tokens,
    )


def _hidden_requests(moment: Moment) -> HiddenRequests:
    shown, left_out = moment.live[:SHOWN_REQUESTS], moment.live[SHOWN_REQUESTS:]
    running = sum(live.state == "running" for live in left_out)
    waiting = sum(live.state != "running" for live in shown)
    return HiddenRequests(running, moment.waiting - waiting)


def _disk_use(disk: DiskCache | None) -> DiskUse | None:
    if disk is None:
        return None
    stats = disk.stats()
    return DiskUse(
        entries=stats.entries,
        used_bytes=stats.used_bytes,
        shared_bytes=stats.shared_bytes,
        limit_bytes=stats.limit_bytes,
        read_bytes=stats.read_bytes,
        written_bytes=stats.written_bytes,
        hits=stats.hits,
        loaded_tokens=stats.loaded_tokens,
    )


def _counters(moment: Moment, requests: int) -> PictureCounters:
    prompt, cached, generated, evictions, first_tokens, first_token_seconds = moment.counters
    return PictureCounters(
        prompt_tokens=prompt,
        cached_tokens=cached,
        generated_tokens=generated,
        evictions=evictions,
        requests=requests,
        first_tokens=first_tokens,
        first_token_seconds=round(first_token_seconds, 4),
    )


Ask = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Calls a function on the engine thread between two steps. Raises EngineStopped."""


class LiveWatch:
    """Implements `engine.api.CacheWatch`. For one task at a time."""

    def __init__(
        self,
        ask: Ask,
        snapshots: SnapshotTaker,
        renderer: Renderer,
        versions: Iterator[int],
        requests: Callable[[], int],
    ) -> None:
        self._ask = ask
        self._snapshots = snapshots
        self._renderer = renderer
        self._versions = versions
        self._requests = requests
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
        picture = self._renderer.render(self._version, self._requests())
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
