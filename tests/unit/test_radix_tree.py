"""What the tree keeps, the order in which it evicts, and that it forgets everything in the end."""

import gc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from kvstore import invariants
from kvstore.lease import Refusal
from kvstore.pool import BlockPool
from kvstore.store import KVStore
from kvstore.tokens import (
    TOKEN_BYTES,
    Tokens,
    block_digests,
    child_digest,
    root_digest,
    unpacked,
)
from kvstore.tree import RadixTree
from kvstore.types import BlockId, Namespace
from tests.unit.kv_helpers import (
    BLOCK,
    NS,
    admit,
    compute,
    drain,
    fork,
    make_store,
    plan,
    run_of,
    serve,
    tree_of,
    walk,
)

A, B, C = run_of(1000, 16), run_of(2000, 16), run_of(3000, 16)


def packed(tokens: list[int]) -> bytes:
    return Tokens(tokens).packed(0, len(tokens))


def hits(store: KVStore, tokens: list[int]) -> int:
    """How many of `tokens` are indexed."""
    return store.probe(NS, Tokens([*tokens, 0]))


def evict(store: KVStore, n_blocks: int) -> None:
    for _ in range(n_blocks):
        assert tree_of(store).evict() is not None
        invariants.check(store)


class TestEvictionOrder:
    def test_the_least_recently_served_goes_first(self) -> None:
        store = make_store(16)
        for prompt in (A[:8], B[:8], C[:8], A[:8]):
            serve(store, prompt)
        evict(store, 2)
        assert [hits(store, prompt[:8]) for prompt in (A, B, C)] == [8, 0, 8]
        evict(store, 2)
        assert [hits(store, prompt[:8]) for prompt in (A, B, C)] == [8, 0, 0]

    def test_a_run_is_forgotten_from_its_end(self) -> None:
        store = make_store(16)
        serve(store, A[:10])
        remaining = []
        for _ in range(3):
            evict(store, 1)
            remaining.append(hits(store, A))
        assert remaining == [8, 4, 0]
        assert tree_of(store).evict() is None
        assert tree_of(store).n_nodes == 0

    def test_leaves_go_before_what_they_stand_on(self) -> None:
        store = make_store(16)
        serve(store, A[:8])
        serve(store, A[:8] + B[:4])
        serve(store, A[:8] + C[:4])
        evict(store, 1)
        assert [hits(store, A[:8] + tail) for tail in (B[:4], C[:4])] == [8, 12]
        evict(store, 1)
        assert hits(store, A[:8]) == 8
        evict(store, 2)
        assert hits(store, A) == 0

    def test_the_cold_remainder_of_a_partly_matched_run_goes_first(self) -> None:
        store = make_store(16)
        serve(store, A)
        serve(store, B[:8])
        serve(store, A[:8] + C[:4])
        evict(store, 2)
        assert [hits(store, A), hits(store, B[:8])] == [8, 8]

    def test_a_leaf_used_since_it_was_queued_is_passed_over(self) -> None:
        store = make_store(16)
        for prompt in (A[:4], B[:4], A[:5], C[:4]):
            serve(store, prompt)
        evict(store, 1)
        assert [hits(store, prompt[:4]) for prompt in (A, B, C)] == [4, 0, 4]

    def test_an_admission_refreshes_what_it_adopts(self) -> None:
        store = make_store(16)
        serve(store, A[:8])
        serve(store, B[:8])
        store.release(admit(store, [*A[:8], 1]))
        evict(store, 2)
        assert [hits(store, A), hits(store, B)] == [8, 0]

    def test_a_request_has_used_its_blocks_until_its_end(self) -> None:
        store = make_store(16)
        serve(store, A[:8])
        lease = admit(store, A[:8])
        compute(store, lease)
        serve(store, B[:8])
        store.donate(lease)
        evict(store, 2)
        assert [hits(store, A), hits(store, B)] == [8, 0]

    def test_looking_refreshes_nothing(self) -> None:
        store = make_store(16)
        serve(store, A[:4])
        serve(store, B[:4])
        store.probe(NS, Tokens(A))
        evict(store, 1)
        assert [hits(store, A), hits(store, B)] == [0, 4]

    def test_admission_evicts_no_more_than_it_needs(self) -> None:
        store = make_store(6)
        serve(store, A[:8])
        serve(store, B[:8])
        lease = admit(store, C[:12])
        assert store.counters.evictions == 1
        assert [hits(store, A), hits(store, B)] == [4, 8]
        store.release(lease)

    def test_what_admission_adopts_is_not_evicted_for_it(self) -> None:
        store = make_store(6)
        serve(store, A[:16])
        serve(store, B[:8])
        assert serve(store, A[:8] + C[:12]) == 8
        assert (hits(store, A), hits(store, B)) == (8, 4), "the oldest that it could do without"

    def test_what_was_replaced_does_not_stay_in_the_queue(self) -> None:
        store = make_store(64)
        serve(store, B[:4])
        for n_tokens in range(1, 16):
            serve(store, A[:n_tokens])  # each tail takes the place of the one before
        queue = tree_of(store)._queue
        assert tree_of(store).n_nodes == 2
        assert len(queue) <= 4


class TestHolders:
    def test_what_a_table_lists_is_not_evicted(self) -> None:
        store = make_store(16)
        serve(store, A[:8])
        serve(store, B[:8])
        lease = admit(store, [*A[:8], 1])
        assert len(drain(store)) == 2
        assert [hits(store, A), hits(store, B)] == [8, 0]
        store.release(lease)
        assert len(drain(store)) == 2
        assert hits(store, A) == 0


class TestTails:
    def test_a_longer_tail_takes_the_place_of_a_shorter_one(self) -> None:
        store = make_store(16)
        serve(store, A[:6])
        assert serve(store, A[:7]) == 6
        assert (store.pool.n_evictable, hits(store, A)) == (2, 7)

    def test_a_whole_block_takes_the_place_of_a_tail(self) -> None:
        store = make_store(16)
        serve(store, A[:6])
        assert serve(store, A[:12]) == 6
        assert (store.pool.n_evictable, hits(store, A), tree_of(store).n_nodes) == (3, 12, 1)

    def test_a_tail_inside_an_indexed_block_is_not_indexed(self) -> None:
        store = make_store(16)
        serve(store, A[:12])
        for n_tokens in (5, 6, 7, 10):
            serve(store, A[:n_tokens])
        assert (store.pool.n_evictable, hits(store, A)) == (3, 12)

    def test_tails_that_differ_stand_side_by_side(self) -> None:
        store = make_store(16)
        serve(store, [*A[:4], 7, 8])
        serve(store, [*A[:4], 7, 9])
        assert store.pool.n_evictable == 3
        assert [hits(store, [*A[:4], 7, last, 1]) for last in (8, 9)] == [6, 6]


class _Traced(Namespace):
    """A namespace that can be watched (a dataclass with slots has no weak references)."""


class TestNamespaces:
    def test_they_are_forgotten_with_their_last_block(self) -> None:
        def indexed_once(cache_salt: str) -> weakref.ref[Namespace]:
            namespace = _Traced(cache_salt=cache_salt)
            serve(store, A, namespace=namespace)
            return weakref.ref(namespace)

        store = make_store(16)
        serve(store, B[:4])
        evicted = indexed_once("evicted")
        assert evicted() is not None
        drain(store)
        gc.collect()
        assert evicted() is None
        cleared = indexed_once("cleared")
        store.clear(cleared())
        store.forget_cleared()
        gc.collect()
        assert cleared() is None

    def test_a_walk_shows_all_of_them(self) -> None:
        store, other = make_store(16), Namespace(model="other")
        serve(store, A[:8])
        serve(store, A[:4] + B[:6])
        serve(store, A[:3], namespace=other)
        seen = {
            (namespace, path): len(node.blocks) for namespace, path, node in walk(tree_of(store))
        }
        assert seen == {
            (NS, Tokens(A).packed(0, 4)): 1,
            (NS, Tokens(A).packed(0, 8)): 1,
            (NS, Tokens(A[:4] + B[:6]).packed(0, 10)): 2,
            (other, Tokens(A).packed(0, 3)): 1,
        }
        assert tree_of(store).n_nodes == 4


def test_blocks_have_the_hashes_of_all_tokens_up_to_their_end() -> None:
    """Also after nodes have been split and have grown. A tail has the hash of its own tokens."""
    store, salted = make_store(40), Namespace(model="m", cache_salt="s")
    for prompt in (A[:14], A[:8] + B[:9], A, A[:4] + C[:4]):
        serve(store, prompt)
    serve(store, A[:5], namespace=salted)
    for namespace, path, node in walk(tree_of(store)):
        tokens = unpacked(path)
        start = len(tokens) - node.n_tokens
        for index, found in enumerate(node.hashes):
            end = min(start + (index + 1) * BLOCK, len(tokens))
            ids = tokens[: start + index * BLOCK]
            whole = block_digests(namespace, Tokens(ids).packed(0, len(ids)), BLOCK)
            above = whole[-1] if whole else root_digest(namespace)
            last = Tokens(tokens).packed(start + index * BLOCK, end)
            assert found == child_digest(above, last)
        assert len(node.hashes) == len(node.blocks)


def test_without_a_disk_cache_nothing_is_hashed() -> None:
    pool = BlockPool(8)
    tree = RadixTree(pool, 4)
    tree.insert(NS, packed(A[:8]), pool.allocate(2))
    (node,) = tree.nodes()
    assert node.hashes == []


def test_evicting_an_empty_index_gives_nothing() -> None:
    assert RadixTree(BlockPool(1), 4).evict() is None


few_tokens = st.lists(st.integers(0, 2), min_size=1, max_size=12)


@given(st.lists(few_tokens, max_size=12), few_tokens, st.integers(2, 4))
def test_a_hit_is_the_longest_common_prefix_with_anything_served(
    served: list[list[int]], prompt: list[int], block_size: int
) -> None:
    store = make_store(100, block_size)
    for tokens in served:
        serve(store, tokens)
    invariants.check_idle(store)
    expected = max((common_prefix(tokens, prompt[:-1]) for tokens in served), default=0)
    assert store.probe(NS, Tokens(prompt)) == expected


def common_prefix(left: list[int], right: list[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b),
        min(len(left), len(right)),
    )


@dataclass(frozen=True)
class Serve:
    prompt: list[int]


@dataclass(frozen=True)
class Probe:
    prompt: list[int]


@dataclass(frozen=True)
class Refuse:
    prompt: list[int]


@given(
    st.lists(
        st.builds(Serve, few_tokens) | st.builds(Probe, few_tokens) | st.builds(Refuse, few_tokens)
    )
)
def test_probes_and_refusals_do_not_change_what_is_evicted_when(
    requests: list[Serve | Probe | Refuse],
) -> None:
    store, undisturbed = make_store(10, 2), make_store(10, 2)
    for request in requests:
        match request:
            case Serve(prompt):
                assert serve(store, prompt) == serve(undisturbed, prompt)
            case Probe(prompt):
                store.probe(NS, Tokens(prompt))
            case Refuse(prompt):
                assert isinstance(store.admit(NS, Tokens(prompt + [9] * 20)), Refusal)
    assert drain(store) == drain(undisturbed)


class TestBehind:
    """A block may be indexed behind another without a walk from the root."""

    def test_a_leaf_grows(self) -> None:
        pool = BlockPool(8)
        tree = RadixTree(pool, 4)
        above, new = pool.allocate(2), pool.allocate(1)
        tree.insert(NS, packed(A[:8]), above)
        assert tree.insert(NS, packed(A[8:12]), new, above[1]) == ()
        assert tree.match(NS, packed(A[:12])).blocks == (*above, *new)
        assert tree.n_nodes == 1

    def test_it_branches_off_in_the_middle_of_a_run(self) -> None:
        pool = BlockPool(8)
        tree = RadixTree(pool, 4)
        run, new = pool.allocate(3), pool.allocate(2)
        tree.insert(NS, packed(A[:12]), run)
        assert tree.insert(NS, packed(B[:8]), new, run[0]) == ()
        assert tree.match(NS, packed(A[:12])).blocks == tuple(run)
        assert tree.match(NS, packed(A[:4] + B[:8])).blocks == (run[0], *new)

    def test_what_the_run_goes_on_with_is_equal(self) -> None:
        pool = BlockPool(8)
        tree = RadixTree(pool, 4)
        run, new = pool.allocate(3), pool.allocate(3)
        tree.insert(NS, packed(A[:12]), run)
        assert tree.insert(NS, packed(A[4:8] + B[:8]), new, run[0]) == (run[1],)
        assert tree.match(NS, packed(A[:8] + B[:8])).blocks == (*run[:2], *new[1:])
        assert tree.insert(NS, packed(A[4:8]), new[:1], run[0]) == (run[1],)

    def test_a_longer_tail_takes_the_place_of_the_run_s(self) -> None:
        pool = BlockPool(8)
        tree = RadixTree(pool, 4)
        run, new = pool.allocate(3), pool.allocate(1)
        tree.insert(NS, packed(A[:10]), run)
        assert tree.insert(NS, packed(A[8:11]), new, run[1]) == ()
        assert tree.match(NS, packed(A[:11])).blocks == (*run[:2], *new)
        assert not pool.is_cached(run[2])

    def test_what_is_used_behind_it_keeps_a_run_from_eviction(self) -> None:
        store = make_store(6)
        lease = admit(store, A[:8])
        compute(store, lease)
        serve(store, B[:8])
        store.donate(lease)  # served before B, and used after it
        evict(store, 2)
        assert [hits(store, prompt[:8]) for prompt in (A, B)] == [8, 0]

    def test_what_stands_above_was_used_as_late_as_what_was_published_behind_it(self) -> None:
        store = make_store(16)
        serve(store, A[:4] + B[:4])
        serve(store, A[:4] + B[8:12])
        user = admit(store, A[:4] + B[:4] + C[:8])
        other = admit(store, C[8:12])
        compute(store, other)
        compute(store, user)
        store.donate(user)
        evict(store, 4)  # both branches; the other prompt is held
        store.release(other)
        evict(store, 1)
        assert [hits(store, prompt) for prompt in (A[:4], C[8:12])] == [4, 0]


def test_a_block_of_which_a_fork_has_left_a_part_is_indexed_whole_again() -> None:
    store = make_store(16)
    lease = admit(store, A[:8])
    compute(store, lease)
    store.clear()
    other = fork(store, lease, A[:7], 7)
    store.donate(other)  # the second block as a tail
    lease.tokens.append(A[8])
    compute(store, lease)
    store.donate(lease)
    invariants.check_idle(store)
    assert hits(store, A[:9]) == 9


class Recording(RadixTree):
    """Notes how many bytes of tokens it is given for each insertion."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        super().__init__(pool, block_size)
        self.given: list[int] = []

    def insert(
        self,
        namespace: Namespace,
        packed: bytes,
        blocks: Sequence[BlockId],
        after: BlockId | None = None,
    ) -> tuple[BlockId, ...]:
        self.given.append(len(packed))
        return super().insert(namespace, packed, blocks, after)


def test_a_block_is_published_alone_however_long_the_prompt() -> None:
    pool = BlockPool(32)
    index = Recording(pool, 4)
    store = KVStore(pool, index, 4)
    prompt = run_of(5000, 64)
    lease = admit(store, prompt)
    for _ in range(16):
        plan(store, lease, 4)
        store.commit(lease, 4)
    assert index.given == [4 * TOKEN_BYTES] * 16
    store.clear()
    store.donate(lease)
    assert index.given[-1] == 64 * TOKEN_BYTES  # what was forgotten is indexed again
    assert hits(store, prompt) == 64
