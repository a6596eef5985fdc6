"""Pictures of a cache: what they show of a scheduler's work, and what they leave out."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from types import FrameType
from typing import Any

import pytest

from engine.core.metrics import LatencyTracker
from engine.core.statistics import loop_stats
from engine.disk_cache.cache import DiskCache
from engine.measuring.telemetry import SilentTelemetry
from engine.values.picture import CachePicture, GroupSlots, Hidden
from engine.values.stats import DiskCacheStats, HitRecord, RecentHits
from engine.watch.picture import ADOPTED_SECONDS, MAX_NODES, Renderer
from engine.watch.snapshot import (
    SHOWN_REQUESTS,
    Live,
    Moment,
    Snapshot,
    SnapshotTaker,
    namespace_id,
)
from kvstore.recurrent import RecurrentGroup
from kvstore.replica import COPIED_NODES, Change, Stored, Used
from kvstore.sizes import StorageBytes
from kvstore.tokens import Tokens
from kvstore.types import BlockId, Namespace
from kvstore.window import WindowGroup
from server.schemas.cache_tree import CacheTree
from tests.contract.fake_engine import DISK
from tests.unit.engine_harness import Harness, prompt

BLOCK = 4
MOST_BYTES = 150_000


class FullDisk(DiskCache):
    """Everything is there, in figures as long as they will ever be."""

    def on_disk(self, blocks: Sequence[BlockId]) -> int:
        return len(blocks)

    def stats(self) -> DiskCacheStats:
        return replace(
            DISK, entries=10**9, used_bytes=10**13, shared_bytes=10**13, loaded_tokens=10**12
        )


class Watcher:
    """Looks at a harness between two steps."""

    def __init__(self, harness: Harness) -> None:
        self.now = 0.0
        latency = LatencyTracker(lambda: self.now, SilentTelemetry())
        sizes = StorageBytes(1024, slots=(0,) * len(harness.store.groups), arenas=0)
        self.snapshots = SnapshotTaker(
            harness.scheduler,
            latency,
            lambda: loop_stats(harness.scheduler, latency, sizes, HitRecord(), 0),
        )
        self.renderer = Renderer(BLOCK, 1024, harness.scheduler.disk)

    def look(self) -> bool:
        return self.renderer.apply(self.snapshots.take())

    def picture(self) -> CachePicture:
        self.look()
        return self.renderer.render(1, 0)


def test_a_shared_prompt_is_one_node_with_its_users_behind_it() -> None:
    harness = Harness()
    watcher = Watcher(harness)
    shared = prompt(1, 12)
    harness.serve(shared, max_tokens=1)
    for i in range(3):
        harness.add([*shared, *prompt(10 + i, 8)])
    harness.step()
    harness.step()
    picture = watcher.picture()
    assert picture.arena.saved_bytes == 2 * 3 * 1024, "three hold three blocks of the prompt"
    (top,) = [node for node in picture.nodes if node.parent is None]
    assert (top.start, top.tokens, top.blocks, top.holders) == (0, 12, 3, 3)
    users = [request for request in picture.requests if request.state == "running"]
    assert [request.cached_tokens for request in users] == [12, 12, 12]
    below = {node.id: node for node in picture.nodes if node.parent == top.id}
    for user in users:
        node = below[user.node or -1]
        assert (node.start, node.holders, node.idle_seconds) == (12, 1, 0.0)
        assert user.prompt_tokens == 20


def test_who_waits_has_no_node() -> None:
    harness = Harness(max_running=1)
    watcher = Watcher(harness)
    for i in range(3):
        harness.add(prompt(i, 8))
    harness.step()
    requests = watcher.picture().requests
    assert [request.state for request in requests] == ["running", "waiting", "waiting"]
    assert [request.node for request in requests[1:]] == [None, None]


def test_what_nobody_uses_grows_old() -> None:
    harness = Harness()
    watcher = Watcher(harness)
    watcher.now = 1000.0  # of a clock that is ahead of the tree's own here
    harness.serve(prompt(1, 8))
    harness.add(prompt(2, 8))
    harness.step()
    harness.step()
    idle, held = ages(watcher)
    assert held == 0.0 < idle
    watcher.now += 30.0
    assert ages(watcher) == [idle + 30.0, 0.0]


def test_an_adoption_is_told_for_a_while() -> None:
    harness = Harness()
    watcher = Watcher(harness)
    harness.serve(prompt(1, 40))
    watcher.look()
    harness.serve([*prompt(1, 40)[:10], *prompt(2, 30)])
    (used,) = (change for change in watcher.snapshots.take().changes if isinstance(change, Used))
    told = [Stored(1, None, Namespace(), 40, tuple(map(BlockId, range(10))), 1.0)]
    adoption = Used(1, used.n_tokens, 1e9 - ADOPTED_SECONDS)
    (found,) = picture_of(made_snapshot([*told, adoption])).adoptions
    assert (found.node, found.tokens, found.seconds) == (1, 10, ADOPTED_SECONDS)
    older = Used(1, 10, 1e9 - ADOPTED_SECONDS - 1)
    assert picture_of(made_snapshot([*told, older])).adoptions == ()


def test_an_adoption_of_what_is_not_shown_ends_above_it() -> None:
    changes = random_tree(10_000, Random(5), 1)
    shown = {node.id for node in picture_of(made_snapshot(changes)).nodes}
    left_out = next(
        change.node
        for change in changes
        if isinstance(change, Stored) and change.node not in shown and change.behind in shown
    )
    (found,) = picture_of(made_snapshot([*changes, Used(left_out, 9, 1e9)])).adoptions
    assert found.node in shown
    assert found.seconds == 0.0


def ages(watcher: Watcher) -> list[float]:
    nodes = sorted(watcher.picture().nodes, key=lambda node: node.id)
    return [node.idle_seconds for node in nodes]


def test_a_look_says_whether_anything_has_moved() -> None:
    harness = Harness()
    watcher = Watcher(harness)
    assert watcher.look()
    assert not watcher.look()
    harness.add(prompt(1, 8))
    assert watcher.look()
    harness.step()
    assert watcher.look()
    while harness.scheduler.has_work:
        harness.step()
    assert watcher.look()
    watcher.now += 100.0
    assert not watcher.look()
    harness.store.clear()
    assert watcher.look()


def test_saved_states_and_holes_are_marked() -> None:
    window = WindowGroup(0, 8, 24, BLOCK, 32)
    states = RecurrentGroup(4, 20, BLOCK, 16)
    harness = Harness(groups=(window, states))
    watcher = Watcher(harness)
    for i in range(6):
        harness.serve(prompt(i, 40))
    picture = watcher.picture()
    assert picture.groups == (
        GroupSlots("window", 8, 24, 24 - window.stats().free),
        GroupSlots("recurrent", None, 24, 24 - states.stats().free),
    )
    newest = max(picture.nodes, key=lambda node: node.id)
    assert {16, 32, 39, 40} <= set(newest.states)
    oldest = min(picture.nodes, key=lambda node: node.id)
    assert oldest.holes == ((0, oldest.tokens),)  # of which others have taken every slot
    carried = window.slots.blocks()
    for node in picture.nodes:
        n_holes = sum(end - start for start, end in node.holes)
        assert n_holes <= node.tokens
        assert all(node.start <= start < end for start, end in node.holes)
    assert len(carried) == sum(
        node.blocks - sum(-(-(end - start) // BLOCK) for start, end in node.holes)
        for node in picture.nodes
    )


def test_a_salt_is_never_shown() -> None:
    harness = Harness()
    watcher = Watcher(harness)
    harness.add(prompt(1, 8), cache_salt="do not tell")
    harness.step()
    text = as_json(watcher.picture())
    assert "do not tell" not in text
    assert namespace_id(Namespace(cache_salt="do not tell")) in text
    (namespace,) = watcher.picture().namespaces
    assert namespace.name == f"salted {namespace.id[:8]}"
    assert namespace.id != "0"


def test_nodes_are_those_that_will_be_evicted() -> None:
    harness = Harness()
    watcher = Watcher(harness)
    for i in range(3):
        harness.serve(prompt(i, 8))
    first, second, third = sorted(watcher.picture().nodes, key=lambda node: node.id)
    assert [node.next_evicted for node in (first, second, third)] == [1, 2, 3]


def made_snapshot(changes: Sequence[Change], live: tuple[Live, ...] = ()) -> Snapshot:
    hits = tuple(RecentHits(900, 10**12, 10**12) for _ in range(3))
    moment = Moment(live, 0, (1, 1, 0, 0), 10**13, (), (), {}, (), hits, (0, 0, 0, 0, 0, 0.0))
    return Snapshot(1e9, changes, True, moment)


def picture_of(snapshot: Snapshot) -> CachePicture:
    renderer = Renderer(BLOCK, 1024, FullDisk())
    renderer.apply(snapshot)
    return renderer.render(10**9, 10**9)


def as_json(picture: CachePicture) -> str:
    return CacheTree.of(picture, "a/model").model_dump_json()


def random_tree(n_nodes: int, random: Random, salts: int) -> list[Change]:
    """With serials as long as they will ever be."""
    changes = list[Change]()
    for i in range(n_nodes):
        at = random.randrange(max(i - 300, 0), i) if i and random.random() < 0.8 else None
        above = changes[at] if at is not None else None
        namespace = (
            above.namespace
            if isinstance(above, Stored)
            else Namespace(cache_salt=str(random.randrange(salts)))
        )
        n_blocks = random.randint(1, 12)
        blocks = tuple(map(BlockId, range(i * 12, i * 12 + n_blocks)))
        behind = None if at is None else 10**9 + at
        changes.append(Stored(10**9 + i, behind, namespace, n_blocks * BLOCK, blocks, 1.0))
    return changes


def adopted(changes: Sequence[Change]) -> list[Change]:
    """As many as are told, of the first nodes."""
    return [Used(10**9 + i, 10**6, 1e9 - 1.23) for i in range(min(len(changes), 40))]


def busy(n_requests: int, n_nodes: int, random: Random) -> tuple[Live, ...]:
    return tuple(
        Live(
            f"{random.getrandbits(128):032x}-{i}#3",
            Namespace(cache_salt="x"),
            "running" if i % 2 == 0 else "loading",
            prompt_tokens=10**6 + i,
            cached_tokens=10**6,
            computed_tokens=10**6,
            output_tokens=10**6,
            node=10**9 + random.randrange(n_nodes),
            has_all=True,
        )
        for i in range(n_requests)
    )


@pytest.mark.parametrize("salts", [1, 20_000])
@pytest.mark.parametrize("n_requests", [0, 16, 1000])
def test_a_large_tree_makes_a_bounded_picture(salts: int, n_requests: int) -> None:
    random = Random(salts + n_requests)
    changes = random_tree(10_000, random, salts)
    told = [*changes, *adopted(changes)]
    picture = picture_of(made_snapshot(told, busy(n_requests, 10_000, random)))
    assert len(as_json(picture)) <= MOST_BYTES
    assert 300 < len(picture.nodes) <= MAX_NODES
    assert len(picture.requests) == min(n_requests, SHOWN_REQUESTS)
    shown, seen = {}, set[int | None]({None})
    for node in picture.nodes:
        assert node.parent in seen, "a child before its parent"
        seen.add(node.id)
        shown[node.id] = node
    left_out = [picture.hidden, *(node.hidden or Hidden() for node in picture.nodes)]
    assert len(shown) + sum(hidden.nodes for hidden in left_out) == 10_000
    stored = [change for change in changes if isinstance(change, Stored)]
    for name, total in (
        ("tokens", sum(change.n_tokens for change in stored)),
        ("blocks", sum(len(change.blocks) for change in stored)),
    ):
        drawn = sum(getattr(node, name) for node in picture.nodes)
        assert drawn + sum(getattr(hidden, name) for hidden in left_out) == total
    if n_requests == 16:
        assert {request.node for request in picture.requests} <= set(shown), "held comes first"


def test_the_heaviest_are_shown() -> None:
    changes = random_tree(10_000, Random(3), 1)
    stored = {change.node: change for change in changes if isinstance(change, Stored)}
    weights = {serial: change.n_tokens for serial, change in stored.items()}
    for serial in sorted(stored, reverse=True):  # children before their parents
        if (behind := stored[serial].behind) is not None:
            weights[behind] += weights[serial]
    shown = {node.id for node in picture_of(made_snapshot(changes)).nodes}
    lightest = min(weights[serial] for serial in shown)
    assert lightest >= max(weights[serial] for serial in stored.keys() - shown)


def lines_of(act: Callable[[], object]) -> int:
    """How many lines of Python it runs, whatever their speed."""
    lines = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return lines


def indexed(n_nodes: int) -> Watcher:
    """So many leaves of one block each."""
    harness = Harness(n_blocks=n_nodes)
    for i in range(n_nodes):
        tokens = Tokens([i, 1, 2, 3]).packed(0, 4)
        (block,) = harness.pool.allocate(1)
        harness.store.index.insert(Namespace(), tokens, (block,))
        harness.pool.release((block,))
    return Watcher(harness)


def test_the_engine_pays_for_what_has_changed_and_not_for_the_tree() -> None:
    small, large = indexed(10), indexed(10_000)
    takes = 1
    while not (snapshot := large.snapshots.take()).is_whole:
        assert len(snapshot.changes) <= COPIED_NODES + 1
        takes += 1
    assert takes == 10_000 // COPIED_NODES + 1
    while not small.snapshots.take().is_whole:
        pass
    assert lines_of(large.snapshots.take) == lines_of(small.snapshots.take)
