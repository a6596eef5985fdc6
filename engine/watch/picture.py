"""Passes snapshots from the engine thread to a worker thread, which renders them."""

import asyncio
import heapq
import time
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set,
)
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from time import thread_time
from types import MappingProxyType
from typing import Any

from engine.api import EngineStopped
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
from engine.values.stats import DiskCacheStats
from engine.watch.snapshot import (
    SHOWN_REQUESTS,
    Live,
    Moment,
    Snapshot,
    SnapshotTaker,
    namespace_id,
)
from kvstore.replica import ReplicaNode, TreeReplica
from kvstore.types import BlockId, Namespace

MAX_NODES = 2000
MAX_MARKS = 32
"""Of each kind on one node: saved states, holes. The last ones, where the next will resume."""

ADAPTER_CHARACTERS = 24
"""Of an adapter's name, in that of a namespace."""

ADOPTED_SECONDS = 5.0
"""So long an adoption is told of."""

PICTURE_BYTES = 147_800
"""The most that a picture takes as JSON, by the sizes below: the most that its parts take."""
NODE_BYTES = 255
REQUEST_BYTES = 260
ADOPTION_BYTES = 60
NAMESPACE_BYTES = 130
STATE_BYTES = 9
HOLE_BYTES = 19


class Renderer:
    """Applies snapshots to a replica of the tree, and makes pictures of it. Not thread-safe."""

    def __init__(
        self,
        block_size: int,
        block_bytes: int,
        disk: DiskCache,
        adapters: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`adapters`: their names by their fingerprints."""
        self._adapters = adapters
        self._block_size = block_size
        self._block_bytes = block_bytes
        self._replica = TreeReplica()
        self._last: Snapshot | None = None
        self._disk = disk
        self._disk_use: DiskUse | None = None

    def apply(self, snapshot: Snapshot) -> bool:
        """Update the replica. Returns whether anything has changed."""
        last, self._last = self._last, snapshot
        used, self._disk_use = self._disk_use, _disk_use(self._disk.stats())
        self._replica.apply(snapshot.changes)
        for live in snapshot.moment.live:
            if live.node is not None:
                self._replica.use(live.node, snapshot.seconds)
        has_moved = last is None or last.moment != snapshot.moment
        return bool(snapshot.changes) or has_moved or used != self._disk_use

    def first_block(self, node_id: int) -> tuple[int, BlockId] | None:
        """How many tokens a node has, and which block it begins with."""
        node = self._replica.nodes.get(node_id)
        return None if node is None else (node.tokens, node.blocks[0])

    def render(self, version: int, requests: int) -> CachePicture:
        """A picture of what was last applied. `requests`: sequences asked for since start."""
        snapshot = self._last
        assert snapshot is not None, "no snapshot has been applied"
        moment = snapshot.moment
        holders = self._holders(moment.live)
        shown = self._shown(holders, len(moment.live[:SHOWN_REQUESTS]), moment)
        hidden = _hidden(shown)
        places = {serial: place for place, serial in enumerate(moment.next_evicted, start=1)}
        roots = {node.namespace for node in shown}
        return CachePicture(
            version=version,
            time=time.time(),
            block_tokens=self._block_size,
            arena=ArenaBlocks(*moment.blocks, moment.saved_bytes, self._block_bytes),
            groups=moment.groups,
            disk=self._disk_use,
            nodes=tuple(
                self._node(node, snapshot, holders, hidden[node.serial], places.get(node.serial))
                for node in shown
            ),
            hidden=_sum(self._replica.roots.values(), shown),
            namespaces=tuple(
                self._namespace(self._replica.roots[name])
                for name in sorted(roots, key=namespace_id)
            ),
            requests=tuple(_request(live, self._replica) for live in moment.live[:SHOWN_REQUESTS]),
            hidden_requests=_hidden_requests(moment),
            adoptions=tuple(self._adoptions(snapshot.seconds, {node.serial for node in shown})),
            recent_hits=moment.recent_hits,
            counters=_counters(moment, requests),
        )

    def _holders(self, live: Iterable[Live]) -> Counter[int]:
        """Of each node, how many sequences hold its last block."""
        holders = Counter[int]()
        for sequence in live:
            node = self._replica.nodes.get(-1 if sequence.node is None else sequence.node)
            if node is not None:
                path = node.path()
                if not sequence.has_all:
                    next(path)
                holders.update(each.serial for each in path)
        return holders

    def _shown(
        self, holders: Counter[int], n_requests: int, moment: Moment
    ) -> Sequence[ReplicaNode]:
        """The nodes that there is room for, parents before children."""
        room = PICTURE_BYTES - n_requests * REQUEST_BYTES
        room -= len(self._replica.adoptions) * ADOPTION_BYTES
        shown, namespaces = list[ReplicaNode](), set[Namespace]()
        rest = [
            entry
            for root in self._replica.roots.values()
            for entry in _entries(root.children.values(), holders)
        ]
        heapq.heapify(rest)
        while rest and len(shown) < MAX_NODES:
            *_, node = heapq.heappop(rest)
            room -= NODE_BYTES
            if node.namespace not in namespaces:
                namespaces.add(node.namespace)
                room -= NAMESPACE_BYTES
            room -= STATE_BYTES * len(self._states(node, moment))
            room -= HOLE_BYTES * len(self._holes(node, moment))
            if room < 0:
                break
            shown.append(node)
            for entry in _entries(node.children.values(), holders):
                heapq.heappush(rest, entry)
        return shown

    def _node(
        self,
        node: ReplicaNode,
        snapshot: Snapshot,
        holders: Counter[int],
        hidden: Hidden,
        place: int | None,
    ) -> PictureNode:
        parent = node.parent
        return PictureNode(
            id=node.serial,
            parent=None if parent is None or parent.parent is None else parent.serial,
            namespace=namespace_id(node.namespace),
            start=node.start,
            tokens=node.tokens,
            disk_tokens=self._on_disk(node),
            blocks=len(node.blocks),
            tail=node.tokens % self._block_size,
            holders=holders[node.serial],
            idle_seconds=round(max(snapshot.seconds - node.last_used, 0.0), 1),
            states=self._states(node, snapshot.moment),
            holes=self._holes(node, snapshot.moment),
            next_evicted=place,
            hidden=hidden if hidden.nodes else None,
        )

    def _adoptions(self, now_seconds: float, shown: Set[int]) -> Iterator[PictureAdoption]:
        """Where a node is not shown, the nearest above it stands for it."""
        for adoption in self._replica.adoptions:
            node = self._replica.nodes.get(adoption.node)
            while node is not None and node.serial not in shown:
                node = node.parent
            seconds = now_seconds - adoption.seconds
            if node is not None and seconds <= ADOPTED_SECONDS:
                yield PictureAdoption(node.serial, adoption.n_tokens, round(max(seconds, 0.0), 2))

    def _on_disk(self, node: ReplicaNode) -> int:
        return min(self._disk.on_disk(node.blocks) * self._block_size, node.tokens)

    def _states(self, node: ReplicaNode, moment: Moment) -> tuple[int, ...]:
        if not moment.states or moment.states.keys().isdisjoint(node.blocks):
            return ()
        found = [
            node.start + index * self._block_size + n_tokens
            for index, block in enumerate(node.blocks)
            for n_tokens in moment.states.get(block, ())
        ]
        return tuple(sorted(found)[-MAX_MARKS:])

    def _namespace(self, root: ReplicaNode) -> PictureNamespace:
        namespace = root.namespace
        name = namespace_id(namespace)
        adapter = self._adapters.get(namespace.adapter, "")
        title = _title(name, adapter, namespace.cache_salt)
        return PictureNamespace(name, title, root.weight.nodes, root.weight.tokens)

    def _holes(self, node: ReplicaNode, moment: Moment) -> tuple[tuple[int, int], ...]:
        """Tokens whose blocks at least one window has nothing of."""
        if not moment.windows or all(window.issuperset(node.blocks) for window in moment.windows):
            return ()
        runs = list[tuple[int, int]]()
        for index, block in enumerate(node.blocks):
            if all(block in window for window in moment.windows):
                continue
            first = index * self._block_size
            end = min(first + self._block_size, node.tokens)
            if runs and runs[-1][1] == first:
                first = runs.pop()[0]
            runs.append((first, end))
        return tuple((node.start + first, node.start + end) for first, end in runs[-MAX_MARKS:])


def _title(name: str, adapter: str, cache_salt: str) -> str:
    """Of a namespace of that id; the salt itself is not shown."""
    parts = [f"adapter {adapter[:ADAPTER_CHARACTERS]}"] if adapter else []
    parts += [f"salted {name[:8]}"] if cache_salt else []
    return ", ".join(parts) or "default"


def _entries(
    nodes: Iterable[ReplicaNode], holders: Counter[int]
) -> Iterator[tuple[bool, int, int, ReplicaNode]]:
    for node in nodes:
        yield not holders[node.serial], -node.weight.tokens, node.serial, node


def _hidden(shown: Sequence[ReplicaNode]) -> dict[int, Hidden]:
    """Of each node that is shown, what is left out below it."""
    left = {
        node.serial: [
            node.weight.nodes - 1,
            node.weight.tokens - node.tokens,
            node.weight.blocks - len(node.blocks),
        ]
        for node in shown
    }
    for node in shown:
        parent = node.parent
        if parent is not None and (counts := left.get(parent.serial)) is not None:
            counts[0] -= node.weight.nodes
            counts[1] -= node.weight.tokens
            counts[2] -= node.weight.blocks
    return {serial: Hidden(*counts) for serial, counts in left.items()}


def _sum(roots: Iterable[ReplicaNode], shown: Sequence[ReplicaNode]) -> Hidden:
    """What is left out below roots."""
    all_of = [root.weight for root in roots]
    tops = [node.weight for node in shown if node.parent is not None and node.parent.parent is None]
    return Hidden(
        sum(w.nodes for w in all_of) - sum(w.nodes for w in tops),
        sum(w.tokens for w in all_of) - sum(w.tokens for w in tops),
        sum(w.blocks for w in all_of) - sum(w.blocks for w in tops),
    )


def _request(live: Live, replica: TreeReplica) -> PictureRequest:
    return PictureRequest(
        id=live.id,
        node=live.node if live.node in replica.nodes else None,
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


def _disk_use(stats: DiskCacheStats | None) -> DiskUse | None:
    if stats is None:
        return None
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
"""Has a function called between two steps, and gives its result. Raises EngineStopped."""


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

    async def look(self) -> int:
        is_whole = False
        while not is_whole:  # the first time, a large tree takes a few steps
            snapshot = await self._ask(self._snapshots.take)
            is_whole = snapshot.is_whole
            if await asyncio.to_thread(self._renderer.apply, snapshot):
                self._version = next(self._versions)
        return self._version

    async def picture(self) -> CachePicture:
        return await asyncio.to_thread(self._rendered)

    def _rendered(self) -> CachePicture:
        began_seconds = thread_time()
        picture = self._renderer.render(self._version, self._requests())
        return replace(picture, cost_seconds=thread_time() - began_seconds)

    async def node(self, node_id: int, most_tokens: int) -> NodeTokens | None:
        await self.look()
        found = self._renderer.first_block(node_id)
        if found is None:
            return None
        n_tokens, block = found
        token_ids = await self._ask(partial(self._snapshots.token_ids, node_id, block, most_tokens))
        return None if token_ids is None else NodeTokens(node_id, n_tokens, token_ids)


@asynccontextmanager
async def watching(
    ask: Ask, snapshots: SnapshotTaker, watch: LiveWatch
) -> AsyncGenerator[LiveWatch]:
    """Ends the watch with the block: no changes are noted any more."""
    try:
        yield watch
    finally:
        with suppress(EngineStopped):
            await asyncio.shield(asyncio.ensure_future(ask(snapshots.close)))
