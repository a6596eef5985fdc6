"""What the store promises to those who lease blocks from it."""

from collections.abc import Callable

import pytest

from kvstore import invariants
from kvstore.lease import Lease, Refusal
from kvstore.ops import CopyBlock, FillBlock, ReadBlock, When
from kvstore.pool import BlockPool
from kvstore.store import KVStore
from kvstore.tokens import Tokens
from kvstore.types import Namespace
from tests.unit.kv_helpers import (
    BLOCK,
    NS,
    admit,
    compute,
    drain,
    fork,
    generate,
    make_store,
    plan,
    run_of,
    serve,
    tree_of,
)

PROMPT = run_of(100, 10)  # two blocks and a tail of two


class TestHits:
    @pytest.mark.parametrize("n_tokens", range(1, 14))
    def test_a_resent_prompt_hits_all_but_its_last_token(self, n_tokens: int) -> None:
        store = make_store(16)
        prompt = run_of(1, n_tokens)
        assert serve(store, prompt) == 0
        assert serve(store, prompt) == n_tokens - 1

    def test_the_next_turn_hits_the_previous_answer_and_its_tail(self) -> None:
        store = make_store(16)
        answer = run_of(200, 5)
        serve(store, PROMPT, answer)
        # Nobody has run the last answer token: there is no KV of it.
        assert serve(store, PROMPT + answer + run_of(300, 3)) == len(PROMPT) + len(answer) - 1

    def test_whole_blocks_are_hit_while_their_sequence_still_runs(self) -> None:
        store = make_store(16)
        running = admit(store, PROMPT)
        assert store.probe(NS, Tokens(PROMPT)) == 0
        compute(store, running)
        assert admit(store, PROMPT).cached_tokens == 8, "its tail is its own until it ends"

    def test_an_admission_that_adopts_nothing_on_purpose(self) -> None:
        store = make_store(16)
        serve(store, PROMPT)
        lease = store.admit(NS, Tokens(PROMPT), reserve_tokens=3, adopts=False)
        assert not isinstance(lease, Refusal)
        assert (lease.cached_tokens, len(lease.table)) == (0, 4)
        compute(store, lease)
        store.donate(lease)
        invariants.check_idle(store)
        assert store.pool.n_evictable == 3, "what it computed again was there already"

    def test_an_empty_prompt_is_a_lease_of_nothing(self) -> None:
        store = make_store(1)
        lease = admit(store, ())
        assert (lease.cached_tokens, len(lease.table)) == (0, 0)
        store.donate(lease)
        assert store.pool.n_free == 1


class TestSharing:
    def test_a_block_that_was_computed_twice_is_kept_once(self) -> None:
        store = make_store(16)
        one, other = admit(store, PROMPT), admit(store, PROMPT)
        compute(store, one)
        n_free = store.pool.n_free
        compute(store, other)
        assert other.table[:2] == one.table[:2]
        assert other.table[2] != one.table[2], "tails are not shared while they are written"
        assert store.pool.n_free == n_free + 2, "the duplicates are free again"


class TestCopyOnWrite:
    def test_a_shared_tail_is_copied_once_by_each_who_writes_behind_it(self) -> None:
        store = make_store(16)
        serve(store, PROMPT)
        lease = admit(store, [*PROMPT, 7, 8, 9])
        tail = lease.table[2]
        [copy] = plan(store, lease, 1)
        assert copy == CopyBlock(tail, lease.table[2], 2)
        store.commit(lease, 1)
        assert plan(store, lease, 1) == ()
        store.commit(lease, 1)
        assert plan(store, lease, 1) == ()
        assert (store.counters.prefix_copies, store.counters.fork_copies) == (1, 0)
        assert serve(store, [*PROMPT, 1]) == 10, "the original is as it was"

    def test_copies_are_counted_by_cause_and_tails_by_what_they_save(self) -> None:
        store = make_store(16)
        serve(store, PROMPT)
        assert store.counters.tail_hit_tokens == 0
        resent = admit(store, PROMPT)
        compute(store, resent)
        assert (resent.cached_tokens, store.counters.tail_hit_tokens) == (9, 1)
        others = [fork(store, resent, PROMPT, 9) for _ in range(2)]
        for number, lease in enumerate((resent, *others)):
            lease.tokens.append(number)
            compute(store, lease)
        assert (store.counters.prefix_copies, store.counters.fork_copies) == (1, 2)
        assert store.counters.tail_hit_tokens == 1, "a fork is no hit"

    def test_whole_blocks_are_never_copied(self) -> None:
        store = make_store(16)
        serve(store, run_of(1, 8))
        assert compute(store, admit(store, [*run_of(1, 8), 9, 9])) == ()

    def test_a_block_that_matches_in_part_is_copied(self) -> None:
        store = make_store(16)
        serve(store, run_of(1, 8))
        lease = admit(store, [*run_of(1, 6), 70, 80])
        adopted = lease.table[1]
        assert compute(store, lease) == (CopyBlock(adopted, lease.table[1], 2),)
        assert serve(store, [*run_of(1, 8), 9]) == 8

    def test_the_last_of_several_writers_needs_no_copy(self) -> None:
        store = make_store(16)
        one = admit(store, PROMPT)
        compute(store, one)
        others = [fork(store, one, PROMPT, 9) for _ in range(2)]
        assert [len(compute(store, lease)) for lease in (*others, one)] == [1, 1, 0]


class TestCommit:
    def test_rejected_tokens_are_planned_again_and_accepted_ones_are_published(self) -> None:
        store = make_store(16)
        lease = admit(store, PROMPT)
        compute(store, lease)
        store.plan(lease, 1)
        assert store.plan_draft(lease, 4) is None
        lease.tokens.append(1)
        lease.tokens.append(2)
        store.commit(lease, n_computed=5, n_accepted=2)
        assert (lease.written_tokens, lease.planned_tokens) == (12, 12)
        assert store.probe(NS, Tokens([*PROMPT, 1, 2, 3])) == 12
        invariants.check(store)
        assert store.plan(lease, 1) is None
        assert lease.planned_tokens == 13

    def test_a_step_that_is_in_flight_stays_planned(self) -> None:
        store = make_store(16)
        lease = admit(store, PROMPT)
        store.plan(lease, 6)
        store.plan(lease, 4)
        store.commit(lease, 6)
        assert (lease.written_tokens, lease.planned_tokens) == (6, 10)
        store.commit(lease, 4)
        assert (lease.written_tokens, lease.planned_tokens) == (10, 10)

    def test_what_comes_from_disk_was_never_planned(self) -> None:
        store = make_store(16)
        lease = store.restore(NS, Tokens(run_of(1, 12)), 0)
        assert isinstance(lease, Lease)
        for written in (4, 12):
            store.commit(lease, written - lease.written_tokens)
            assert lease.planned_tokens == written
            assert store.probe(NS, Tokens(run_of(1, 13))) == written
        store.donate(lease)
        invariants.check_idle(store)


class TestOps:
    def test_ops_are_handed_out_once_in_the_order_of_queueing(self) -> None:
        store = make_store(16)
        serve(store, PROMPT)
        lease = admit(store, [*PROMPT, 7])
        tail, read = lease.table[2], ReadBlock(lease.table[0], BLOCK)
        store.read(read)
        store.plan(lease, 1)
        assert store.fill(lease.table[2], BLOCK, (b"kv",), is_new=True)
        assert not store.fill(lease.table[0], BLOCK, (b"kv",), is_new=False)
        assert store.take_ops() == [
            (When.READ, read),
            (When.FIRST, CopyBlock(tail, lease.table[2], 2)),
            (When.FIRST, FillBlock(lease.table[2], b"kv")),
        ]
        assert store.take_ops() == []


class TestFork:
    def test_a_fork_shares_everything_that_was_written(self) -> None:
        store = make_store(16)
        one = admit(store, PROMPT, reserve_tokens=1)
        compute(store, one)
        forks = [fork(store, one, PROMPT, len(PROMPT) - 1) for _ in range(3)]
        assert all(list(lease.table) == list(one.table) for lease in forks)
        assert [lease.cached_tokens for lease in forks] == [9, 9, 9]
        assert store.pool.n_referenced == 3
        for i, lease in enumerate((one, *forks)):
            generate(store, lease, run_of(100 * i, 3))
            store.donate(lease)
        invariants.check_idle(store)
        for i in range(4):
            assert store.probe(NS, Tokens([*PROMPT, *run_of(100 * i, 3)])) == 12

    def test_what_is_not_written_cannot_be_forked(self) -> None:
        store = make_store(16)
        lease = admit(store, PROMPT)
        with pytest.raises(ValueError, match="1 tokens to fork, 0 written"):
            store.fork(lease, Tokens(PROMPT), 1)

    def test_a_fork_without_room_for_its_copy_is_refused(self) -> None:
        store = make_store(3)
        one = admit(store, PROMPT)
        compute(store, one)
        assert store.fork(one, Tokens(PROMPT), 9) == Refusal(1, 0)
        assert store.leases == {one}
        assert store.pool.n_shared == 0
        other = fork(store, one, PROMPT[:8], 8)
        assert other.table[:] == one.table[:2], "at a block boundary nothing will be copied"

    def test_a_fork_leaves_spare_blocks_to_others(self) -> None:
        store = make_store(5)
        one = admit(store, PROMPT)
        compute(store, one)
        assert store.fork(one, Tokens(PROMPT), 9, spare_blocks=2) == Refusal(3, 2)
        assert store.fork(one, Tokens(PROMPT), 9, 3, spare_blocks=1) == Refusal(3, 2)
        assert isinstance(store.fork(one, Tokens(PROMPT), 9, spare_blocks=1), Lease)


class TestRefusal:
    def test_it_says_what_was_needed_and_what_there_was(self) -> None:
        store = make_store(4)
        admit(store, run_of(1, 9))
        assert store.admit(NS, Tokens(PROMPT)) == Refusal(needed_blocks=3, available_blocks=1)

    def test_blocks_that_would_be_adopted_are_not_counted_as_room(self) -> None:
        store = make_store(4)
        serve(store, run_of(1, 8))
        admit(store, [9])
        # One block is free; the two cached ones are those that the prompt itself begins with.
        assert store.admit(NS, Tokens(run_of(1, 17))) == Refusal(3, 1)
        admit(store, run_of(1, 12))

    def test_spare_blocks_stay_available_to_others(self) -> None:
        store = make_store(4)
        assert store.admit(NS, Tokens(PROMPT), spare_blocks=2) == Refusal(5, 4)
        admit(store, PROMPT, spare_blocks=1)
        assert store.available_blocks == 1

    def test_room_for_the_reserve_is_allocated_at_once(self) -> None:
        store = make_store(4)
        assert store.admit(NS, Tokens(PROMPT), reserve_tokens=7) == Refusal(5, 4)
        lease = admit(store, PROMPT, reserve_tokens=6)
        assert len(lease.table) == 4

    @pytest.mark.parametrize(
        "operation",
        [
            lambda store, _: store.admit(NS, Tokens(run_of(1, 8) + run_of(800, 80))),
            lambda store, _: store.admit(NS, Tokens(run_of(1, 80)), adopts=False),
            lambda store, lease: store.plan(lease, 80),
            lambda store, lease: store.fork(lease, Tokens(run_of(900, 2) + run_of(800, 80)), 2),
        ],
        ids=["admit", "admit and adopt nothing", "plan", "fork"],
    )
    def test_it_leaves_no_trace(self, operation: Callable[[KVStore, object], object]) -> None:
        def scenario(*, is_refused: bool) -> tuple[object, ...]:
            store = make_store(9)
            serve(store, run_of(1, 8))
            serve(store, run_of(100, 10))
            lease = admit(store, run_of(900, 3))
            compute(store, lease)
            if is_refused:
                assert isinstance(operation(store, lease), Refusal)
            invariants.check(store)
            seen = (store.counters, store.pool.free_blocks(), list(lease.table), store.leases)
            store.release(lease)
            return (*seen[:3], len(store.leases), drain(store))

        assert scenario(is_refused=True) == scenario(is_refused=False)

    def test_a_prompt_that_fills_the_pool_can_be_resent(self) -> None:
        """All blocks are its own: there is none left to copy the last one to."""
        store = make_store(4)
        serve(store, run_of(1, 15))
        assert serve(store, run_of(1, 15)) == 12
        assert serve(store, run_of(1, 16)) == 12


class TestEnd:
    @pytest.mark.parametrize("end", [KVStore.release, KVStore.donate])
    def test_a_lease_ends_once(self, end: Callable[[KVStore, object], None]) -> None:
        store = make_store(16)
        lease = admit(store, PROMPT)
        compute(store, lease)
        end(store, lease)
        for again in (store.release, store.donate):
            with pytest.raises(ValueError, match="released before"):
                again(lease)
        invariants.check_idle(store)

    def test_a_release_leaves_published_blocks_but_no_tail(self) -> None:
        store = make_store(16)
        lease = admit(store, PROMPT)
        compute(store, lease)
        store.release(lease)
        assert store.probe(NS, Tokens(PROMPT)) == 8

    def test_reserved_blocks_behind_what_was_written_become_free(self) -> None:
        store = make_store(16)
        lease = admit(store, PROMPT, reserve_tokens=20)
        compute(store, lease)
        store.donate(lease)
        assert (store.pool.n_evictable, store.pool.n_free) == (3, 13)


class TestClear:
    def test_it_tells_how_many_blocks_became_free(self) -> None:
        store = make_store(16)
        serve(store, PROMPT)
        serve(store, run_of(500, 5))
        store.clear()
        assert store.forget_cleared() == 5
        assert (store.pool.n_free, tree_of(store).n_nodes) == (16, 0)
        assert serve(store, PROMPT) == 0

    def test_live_leases_keep_their_blocks_and_publish_them_again(self) -> None:
        store = make_store(16)
        lease = admit(store, PROMPT)
        compute(store, lease)
        store.clear()
        invariants.check(store)
        assert store.forget_cleared() == 0
        invariants.check(store)
        assert store.probe(NS, Tokens(PROMPT)) == 0
        generate(store, lease, run_of(200, 3))
        assert store.probe(NS, Tokens(PROMPT + run_of(200, 3))) == 12
        store.donate(lease)
        invariants.check_idle(store)
        assert serve(store, PROMPT + run_of(200, 3)) == 12

    def test_one_namespace_of_several(self) -> None:
        store, other = make_store(16), Namespace(model="m", cache_salt="tenant")
        serve(store, PROMPT)
        assert serve(store, PROMPT, namespace=other) == 0, "namespaces share nothing"
        store.clear(other)
        assert store.forget_cleared() == 3
        store.clear(other)
        assert store.forget_cleared() is None
        assert serve(store, PROMPT, namespace=other) == 0
        assert serve(store, PROMPT) == 9
        assert len(drain(store)) == 6, "what was left can still be evicted"


def test_what_is_cached_above_a_held_block_cannot_be_taken() -> None:
    """The one case in which `available_blocks` promises too much.

    A block that only the index keeps can stand above one that a table holds: the holder's own copy
    of it was forgotten by a clear, and somebody else's was indexed in its place.
    """
    store = make_store(7)
    one = admit(store, run_of(1, 12))
    compute(store, one)
    two = fork(store, one, run_of(1, 12), 12)
    store.clear()
    store.forget_cleared()
    serve(store, run_of(1, 8))
    generate(store, one, run_of(13, 5))
    store.release(one)
    # Cached are the first two blocks, above the third that `two` holds, and the fourth.
    assert (store.pool.n_free, store.pool.n_evictable, store.pool.n_referenced) == (1, 3, 3)
    prompt = run_of(1, 4) + run_of(700, 12)
    assert store.admit(NS, Tokens(prompt)) == Refusal(needed_blocks=3, available_blocks=2)
    invariants.check(store)
    store.release(two)
    invariants.check_idle(store)
    assert serve(store, prompt) == 4


class TestNoIndex:
    def test_nothing_is_shared_and_nothing_is_left(self) -> None:
        pool = BlockPool(8)
        store = KVStore(pool, None, BLOCK)
        assert serve(store, PROMPT) == 0
        assert serve(store, PROMPT, run_of(200, 5)) == 0
        assert store.probe(NS, Tokens(PROMPT)) == 0
        store.clear()
        assert (pool.n_free, store.forget_cleared()) == (8, None)
        invariants.check_idle(store)

    def test_forks_share_all_the_same(self) -> None:
        store = KVStore(BlockPool(8), None, BLOCK)
        one = admit(store, PROMPT)
        compute(store, one)
        assert len(compute(store, fork(store, one, PROMPT, 9))) == 1
        assert store.pool.n_shared == 2

    def test_a_full_pool_refuses(self) -> None:
        store = KVStore(BlockPool(2), None, BLOCK)
        assert store.admit(NS, Tokens(PROMPT)) == Refusal(3, 2)
        assert store.pool.n_free == 2
