"""Pictures of a cache: what they show while a scheduler works, and what they leave out."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import count
from random import Random

import pytest

from engine.core.metrics import HIT_WINDOWS_SECONDS
from engine.core.namespace_ids import namespace_id
from engine.disk_cache.cache import DiskCache
from engine.values.request import WaitReason
from engine.values.stats import DiskCacheStats, RecentHits, RequestInfo
from engine.values.tree import (
    HiddenNodes,
    HiddenRequests,
    TreeArena,
    TreeCounters,
    TreeGroup,
    TreeSnapshot,
)
from engine.watch.feed import ADOPTED_SECONDS, Rendered, Renderer
from engine.watch.snapshot import (
    SHOWN_NODES,
    SHOWN_REQUESTS,
    EngineSnapshot,
    SnapshotTaker,
)
from kvstore import snapshot
from kvstore.node import Node
from kvstore.pool import BlockPool
from kvstore.recurrent import RecurrentGroup
from kvstore.sizes import StorageBytes
from kvstore.snapshot import adoption_views, tree_view
from kvstore.tokens import Digest, Tokens
from kvstore.tree import MAX_ADOPTIONS, RadixTree
from kvstore.types import Namespace
from kvstore.window import WindowGroup
from server.admin_schema import CacheTree
from tests.contract.fake_engine import DISK
from tests.line_counts import lines_of
from tests.unit.engine_harness import Harness, prompt
from tests.unit.kv_helpers import tree_of

BLOCK = 4
MOST_BYTES = 150_000


class FullDisk(DiskCache):
    """Has everything, with figures as long as they will ever be."""

    def __init__(self) -> None:
        """It has no tier."""

    def on_disk(self, hashes: Sequence[Digest]) -> int:
        return len(hashes)

    def stats(self) -> DiskCacheStats:
        return replace(
            DISK, entries=10**9, used_bytes=10**13, shared_bytes=10**13, loaded_tokens=10**12
        )


class Watcher:
    """Looks at a harness between two steps."""

    def __init__(self, harness: Harness) -> None:
        self.now = 0.0
        harness.scheduler.metrics.now = lambda: self.now
        sizes = StorageBytes(1024, slots=(0,) * len(harness.store.groups), arenas=0)
        self.snapshots = SnapshotTaker(harness.scheduler, sizes)
        self.renderer = Renderer(BLOCK, harness.scheduler.disk)
        self.last: Rendered | None = None

    def look(self) -> bool:
        """Returns whether anything but ages has changed."""
        last, self.last = self.last, self.renderer.render(self.snapshots.take(), self.last)
        return last is None or last.snapshot.version != self.last.snapshot.version

    def picture(self) -> TreeSnapshot:
        self.look()
        assert self.last is not None
        return self.last.snapshot


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
        assert (node.start, node.holders, node.used_seconds) == (12, 1, None)
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


def test_only_the_first_requests_are_shown() -> None:
    harness = Harness(max_running=2, max_waiting=300)
    watcher = Watcher(harness)
    for i in range(SHOWN_REQUESTS + 5):
        harness.add(prompt(i, 8), n=2 if i == 0 else 1)
    harness.step()
    picture = watcher.picture()
    assert {"request-0", "request-0#1"} <= {request.id for request in picture.requests}
    assert len(picture.requests) == SHOWN_REQUESTS
    assert picture.hidden_requests == HiddenRequests(running=0, waiting=6)


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


def test_an_adoption_is_shown_for_a_while() -> None:
    harness = Harness()
    watcher = Watcher(harness)
    harness.serve(prompt(1, 40))
    harness.serve([*prompt(1, 40)[:10], *prompt(2, 30)])
    (adopted,) = tree_of(harness.store).adoptions
    watcher.now = adopted.seconds + ADOPTED_SECONDS
    picture = watcher.picture()
    (found,) = picture.adoptions
    assert (found.tokens, found.seconds) == (10, ADOPTED_SECONDS)
    (node,) = [node for node in picture.nodes if node.id == found.node]
    assert node.start < 10 <= node.start + node.tokens
    watcher.now += 1
    assert watcher.picture().adoptions == ()


def test_an_adoption_goes_with_the_tokens_that_were_found() -> None:
    """Also when the node is split afterwards, and no further than its block is indexed."""
    harness = Harness()
    watcher = Watcher(harness)
    harness.serve(prompt(1, 40))
    harness.serve([*prompt(1, 40)[:36], *prompt(2, 4)])
    watcher.now = tree_of(harness.store).adoptions[0].seconds
    before = watcher.picture()
    tree_of(harness.store).adoptions.clear()
    harness.serve([*prompt(1, 40)[:36], *prompt(3, 4)])
    harness.serve([*prompt(1, 40)[:12], *prompt(4, 4)])  # splits the node of the 36 tokens
    picture = watcher.picture()
    assert len(picture.nodes) > len(before.nodes)
    nodes = {node.id: node for node in picture.nodes}
    for adoption in picture.adoptions:
        node = nodes[adoption.node]
        assert node.start < adoption.tokens <= node.start + node.tokens
    assert [adoption.tokens for adoption in picture.adoptions] == [36, 12]
    harness.store.clear()
    harness.serve(prompt(5, 40))
    assert watcher.picture().adoptions == ()


def test_the_last_adoptions_are_kept() -> None:
    tree = RadixTree(BlockPool(20), BLOCK)
    blocks = tree._pool.allocate(20)
    tree.insert(Namespace(), packed(range(80)), blocks)
    for n_tokens in range(1, 41):
        tree.touch(tree.match(Namespace(), packed(range(n_tokens))))
    assert [view.n_tokens for view in adoption_views(tree)] == list(range(41 - MAX_ADOPTIONS, 41))


def test_an_adoption_of_what_is_not_shown_ends_above_it() -> None:
    tree = random_tree(10_000, Random(5), 1)
    shown = {node.id for node in picture_of(made_snapshot(tree)).nodes}
    left_out = next(
        node
        for node in tree.nodes()
        if node.serial not in shown and node.parent is not None and node.parent.serial in shown
    )
    adopt(tree, left_out)
    (found,) = picture_of(made_snapshot(tree)).adoptions
    assert left_out.parent is not None
    assert (found.node, found.seconds) == (left_out.parent.serial, 1.23)


def ages(watcher: Watcher) -> list[float]:
    picture = watcher.picture()
    nodes = sorted(picture.nodes, key=lambda node: node.id)
    return [node.idle_seconds(picture.seconds) for node in nodes]


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
    watcher.now += HIT_WINDOWS_SECONDS[-1]
    assert watcher.look(), "the prompt is no longer recent"
    watcher.now += 100.0
    assert not watcher.look()
    harness.store.clear()
    assert watcher.look()


def test_received_sequences_are_counted_in_pictures() -> None:
    harness = Harness()
    watcher = Watcher(harness)
    assert watcher.picture().counters.requests == 0
    harness.scheduler.metrics.received += 3
    assert watcher.look()
    assert watcher.picture().counters.requests == 3


def test_saved_states_and_holes_are_marked() -> None:
    window = WindowGroup(0, 8, 24, BLOCK, 32)
    states = RecurrentGroup(4, 20, BLOCK, 16)
    harness = Harness(groups=(window, states))
    watcher = Watcher(harness)
    for i in range(6):
        harness.serve(prompt(i, 40))
    picture = watcher.picture()
    assert picture.groups == (
        TreeGroup("window", 8, 24, 24 - window.stats().free),
        TreeGroup("recurrent", None, 24, 24 - states.stats().free),
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


def packed(token_ids: Iterable[int]) -> bytes:
    tokens = Tokens(token_ids)
    return tokens.packed(0, len(tokens))


def made_snapshot(
    tree: RadixTree, requests: tuple[RequestInfo, ...] = (), held: Iterable[Node] = ()
) -> EngineSnapshot:
    """With figures as long as they will ever be."""
    hits = tuple(RecentHits(900, 10**12, 10**12) for _ in range(3))
    holders = Counter(each for node in held for each in node.path())
    adoptions = tuple(view._replace(n_tokens=10**6) for view in adoption_views(tree))
    return EngineSnapshot(
        seconds=1e9,
        tree=tree_view(tree, holders, SHOWN_NODES),
        adoptions=adoptions,
        requests=requests,
        hidden_requests=HiddenRequests(10**6, 10**6),
        arena=TreeArena(1, 1, 0, 0, 10**13, 1024),
        groups=(),
        windows=(),
        states={},
        next_evicted=(),
        recent_hits=hits,
        counters=TreeCounters(10**9, 10**9, 10**9, 10**9, 10**9, 10**9, 1e9),
    )


def picture_of(snapshot: EngineSnapshot) -> TreeSnapshot:
    return replace(Renderer(BLOCK, FullDisk()).render(snapshot).snapshot, version=10**9)


def as_json(picture: TreeSnapshot) -> str:
    return CacheTree.of(picture, "a/model").model_dump_json()


def random_tree(n_nodes: int, random: Random, salts: int) -> RadixTree:
    """Prompts that branch off from earlier ones, with serials as long as they will ever be."""
    pool = BlockPool(12 * n_nodes)
    tree = RadixTree(pool, BLOCK, lambda: 1.0, hashes_blocks=True)
    tree._serials = count(10**9)
    prompts = list[tuple[Namespace, list[int]]]()
    while tree.n_nodes < n_nodes:
        namespace, base = Namespace(cache_salt=str(random.randrange(salts))), list[int]()
        if prompts and random.random() < 0.8:
            namespace, base = random.choice(prompts[-300:])
        cut = random.randint(0, len(base) // BLOCK)
        fresh = pool.allocate(random.randint(1, 12))
        new = random.choices(range(10**6), k=BLOCK * len(fresh))
        prompts.append((namespace, base[: cut * BLOCK] + new))
        known = tree.match(namespace, packed(base[: cut * BLOCK])).blocks
        tree.insert(namespace, packed(prompts[-1][1]), (*known, *fresh))
        pool.release(fresh)
    return tree


def adopt(tree: RadixTree, node: Node) -> None:
    """A lease adopts the path to a node, 1.23 seconds before the snapshot."""
    path = list(node.path())[::-1]
    tree._clock = lambda: 1e9 - 1.23
    tree.touch(tree.match(node.namespace, b"".join(bytes(each.packed) for each in path)))


def busy(nodes: Sequence[Node], random: Random) -> tuple[RequestInfo, ...]:
    return tuple(
        RequestInfo(
            f"{random.getrandbits(128):032x}-{i}",
            index=3,
            waits_for=None if i % 2 == 0 else WaitReason.DISK,
            prompt_tokens=10**6 + i,
            cached_tokens=10**6,
            computed_tokens=10**6,
            output_tokens=10**6,
            blocks=1,
            namespace=namespace_id(Namespace(cache_salt="x")),
            node=node.serial,
        )
        for i, node in enumerate(nodes)
    )


@pytest.mark.parametrize("salts", [1, 20_000])
@pytest.mark.parametrize("n_requests", [0, 16, 1000])
def test_a_large_tree_makes_a_bounded_picture(salts: int, n_requests: int) -> None:
    random = Random(salts + n_requests)
    tree = random_tree(10_000, random, salts)
    nodes = list(tree.nodes())
    for node in nodes[:40]:
        adopt(tree, node)
    held = random.choices(nodes, k=n_requests)
    picture = picture_of(made_snapshot(tree, busy(held[:SHOWN_REQUESTS], random), held))
    assert len(as_json(picture)) <= MOST_BYTES
    assert 300 < len(picture.nodes) <= SHOWN_NODES
    assert len(picture.requests) == min(n_requests, SHOWN_REQUESTS)
    shown, seen = {}, set[int | None]({None})
    for drawn in picture.nodes:
        assert drawn.parent in seen, "a child before its parent"
        seen.add(drawn.id)
        shown[drawn.id] = drawn
    left_out = [picture.hidden, *(node.hidden or HiddenNodes() for node in picture.nodes)]
    assert len(shown) + sum(hidden.nodes for hidden in left_out) == len(nodes)
    for name, total in (
        ("tokens", sum(node.n_tokens for node in nodes)),
        ("blocks", sum(len(node.blocks) for node in nodes)),
    ):
        drawn = sum(getattr(node, name) for node in picture.nodes)
        assert drawn + sum(getattr(hidden, name) for hidden in left_out) == total
    if n_requests == 16:
        assert {request.node for request in picture.requests} <= set(shown), "held comes first"


def test_the_heaviest_are_shown() -> None:
    tree = random_tree(10_000, Random(3), 1)
    weights = dict.fromkeys((node.serial for node in tree.nodes()), 0)
    for node in tree.nodes():
        for above in node.path():
            weights[above.serial] += node.n_tokens
    shown = {node.id for node in picture_of(made_snapshot(tree)).nodes}
    lightest = min(weights[serial] for serial in shown)
    assert lightest >= max(weights[serial] for serial in weights.keys() - shown)


def index_leaf(harness: Harness, first_token: int) -> None:
    """Index a prompt of one block, which begins with `first_token`."""
    (block,) = harness.pool.allocate(1)
    tree_of(harness.store).insert(Namespace(), packed([first_token, 1, 2, 3]), (block,))
    harness.pool.release((block,))


def indexed(n_nodes: int, harness: Harness | None = None) -> Watcher:
    """Watches a tree of `n_nodes` leaves of one block each."""
    harness = harness or Harness(n_blocks=n_nodes)
    for i in range(n_nodes):
        index_leaf(harness, i)
    return Watcher(harness)


def test_a_tree_that_has_not_changed_is_not_walked() -> None:
    small, large = indexed(10), indexed(10_000)
    for watcher in (small, large):
        watcher.look()
    assert lines_of(large.snapshots.take) == lines_of(small.snapshots.take)


def test_the_tokens_of_a_shown_node_are_found_without_a_walk() -> None:
    """Even where the tree has changed since it was shown."""
    harness = Harness(n_blocks=1_000)
    watcher = indexed(900, harness)
    shown = watcher.picture().nodes[0]
    index_leaf(harness, 900)
    n_lines = lines_of(lambda: watcher.snapshots.node(shown.id, 3))
    assert 5 * n_lines < lines_of(watcher.snapshots.take)


def test_a_node_that_is_gone_has_not_the_tokens_of_the_next_in_its_block() -> None:
    harness = Harness(n_blocks=1)
    watcher = indexed(1, harness)
    (gone,) = watcher.picture().nodes
    harness.store.clear()
    assert watcher.snapshots.node(gone.id, 3) is None
    harness.store.forget_cleared()
    index_leaf(harness, 1)
    assert watcher.snapshots.node(gone.id, 3) is None


def test_the_engine_pays_for_what_is_shown_and_not_for_the_tree() -> None:
    small, large = random_tree(1_000, Random(1), 1), random_tree(10_000, Random(1), 1)
    assert small.add_up()
    assert large.add_up()
    few = lines_of(lambda: tree_view(small, Counter(), SHOWN_NODES))
    assert lines_of(lambda: tree_view(large, Counter(), SHOWN_NODES)) < 2 * few


def test_a_wide_node_is_looked_at_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "MAX_SIBLINGS", 700)
    small, large = indexed(700), indexed(10_000)
    for watcher in (small, large):
        while not watcher.snapshots.prepare():
            continue
    assert lines_of(large.snapshots.take) == lines_of(small.snapshots.take)
    picture = large.picture()
    assert len(picture.nodes) + picture.hidden.nodes == 10_000
