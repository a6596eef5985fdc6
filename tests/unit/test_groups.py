"""Windows and recurrent states behind the store's operations, seen from outside."""

from collections import Counter
from collections.abc import Sequence

import pytest

from engine.core.statistics import forget_cleared, saved_bytes
from engine.values.stats import Cleared
from kvstore import invariants
from kvstore.lease import Lease, Refusal
from kvstore.ops import (
    CopyBlock,
    CopyState,
    ReadBlock,
    ResetState,
    RollBackState,
    RoundState,
    StorageOp,
    TablePatch,
    When,
)
from kvstore.pool import BlockPool
from kvstore.recurrent import RecurrentGroup, RecurrentState, RoundedGroup
from kvstore.sizes import StorageBytes
from kvstore.slots import Group, SlotPool
from kvstore.store import KVStore
from kvstore.tokens import Tokens
from kvstore.tree import RadixTree
from kvstore.types import BlockId, SlotId
from kvstore.window import WindowGroup, WindowState, lease_slots
from tests.unit.kv_helpers import BLOCK, NS, admit, run_of

STEP = 16


def make_store(*groups: Group, n_blocks: int = 64) -> KVStore:
    pool = BlockPool(n_blocks)
    return KVStore(pool, RadixTree(pool, BLOCK), BLOCK, groups)


def windows(window: int, n_slots: int = 60) -> WindowGroup:
    return WindowGroup(0, window, n_slots, BLOCK, STEP)


def states(n_saved: int = 20, interval_tokens: int = 1000, n_running: int = 4) -> RecurrentGroup:
    return RecurrentGroup(n_running, n_saved, BLOCK, interval_tokens)


def plan(
    store: KVStore, lease: Lease, n_tokens: int, sampled_position: int = 0
) -> list[tuple[When, StorageOp]]:
    """Plan a step. Returns all ops that were queued for it."""
    assert store.plan(lease, n_tokens, sampled_position) is None
    return [(when, op) for when, op in store.take_ops() if not isinstance(op, ReadBlock)]


def compute(store: KVStore, lease: Lease, until: int | None = None) -> list[StorageOp]:
    """In steps as the scheduler takes them; all ops that were given."""
    given: list[StorageOp] = []
    end = len(lease.tokens) if until is None else until
    while lease.written_tokens < end:
        n_tokens = lease.max_step_tokens(min(end - lease.written_tokens, STEP))
        given += [op for _, op in plan(store, lease, n_tokens)]
        store.commit(lease, n_tokens)
        invariants.check(store)
    return given


def serve(store: KVStore, prompt: Sequence[int], answer: Sequence[int] = ()) -> int:
    """A whole request; returns how many tokens of its prompt were cached."""
    lease = admit(store, prompt)
    compute(store, lease)
    for token_id in answer:
        lease.tokens.append(token_id)
        compute(store, lease)
    store.donate(lease)
    invariants.check_idle(store)
    return lease.cached_tokens


def held(lease: Lease) -> WindowState:
    [state] = lease.group_states
    assert isinstance(state, WindowState)
    return state


class TestSlotPool:
    def test_a_slot_is_free_held_or_cached(self) -> None:
        slots = SlotPool(2)
        slot = slots.allocate()
        assert slot is not None
        assert (slots.n_free, slots.n_referenced, slots.n_evictable) == (1, 1, 0)
        slots.attach(BlockId(7), 3, slot)
        slots.release(slot)
        assert (slots.n_free, slots.n_referenced, slots.n_evictable) == (1, 0, 1)
        slots.forget(BlockId(7))
        assert (slots.n_free, slots.n_referenced, slots.n_evictable) == (2, 0, 0)

    def test_the_least_recently_used_goes_first(self) -> None:
        slots = SlotPool(3)
        for block in range(3):
            slot = slots.allocate()
            assert slot is not None
            slots.attach(BlockId(block), 0, slot)
            slots.release(slot)
        slots.retain(slots.attached_to(BlockId(0))[0])
        slots.release(slots.attached_to(BlockId(0))[0])
        slots.allocate()
        assert [bool(slots.attached_to(BlockId(block))) for block in range(3)] == [
            True,
            False,
            True,
        ]
        assert slots.evictions == 1

    def test_what_is_held_is_never_evicted(self) -> None:
        slots = SlotPool(1)
        assert slots.allocate() is not None
        assert slots.allocate() is None

    def test_one_slot_is_attached_to_two_blocks(self) -> None:
        slots = SlotPool(1)
        slot = slots.allocate()
        assert slot is not None
        slots.attach(BlockId(1), 2, slot)
        slots.copy(BlockId(1), BlockId(2), 2)
        slots.copy(BlockId(1), BlockId(3), 1)
        slots.release(slot)
        slots.forget(BlockId(1))
        assert slots.attached_to(BlockId(2)) == {2: slot}
        assert not slots.attached_to(BlockId(3))
        assert slots.n_evictable == 1

    def test_misuse_raises(self) -> None:
        slots = SlotPool(1)
        with pytest.raises(ValueError, match="free and cannot be retained"):
            slots.retain(SlotId(0))
        with pytest.raises(ValueError, match="used by no lease"):
            slots.release(SlotId(0))
        with pytest.raises(ValueError, match="at least one slot"):
            SlotPool(0)

    def test_problems_are_found(self) -> None:
        slots = SlotPool(2)
        slot = slots.allocate()
        assert slot is not None
        assert not any(slots.problems(Counter({slot: 1})))
        assert list(filter(None, slots.problems(Counter()))) == [
            f"slot {slot}: 1 references, 0 leases"
        ]


class TestWindows:
    def test_blocks_that_leave_the_window_are_let_go(self) -> None:
        group = windows(window=6)
        store = make_store(group)
        lease = admit(store, run_of(0, 40))
        compute(store, lease)
        assert (held(lease).first, len(held(lease).slots)) == (8, 2)
        assert group.stats().held == 2

    def test_a_hit_needs_the_trailing_window_alone(self) -> None:
        group = windows(window=6, n_slots=lease_slots(6, BLOCK, STEP))
        store = make_store(group)
        serve(store, run_of(0, 40))  # more than its slots hold: the first ones are gone
        assert serve(store, [*run_of(0, 40), 999]) == 40

    def test_without_its_window_a_prefix_is_no_hit(self) -> None:
        group = windows(window=6, n_slots=lease_slots(6, BLOCK, STEP))
        store = make_store(group)
        serve(store, run_of(0, 40))
        assert store.probe(NS, Tokens([*run_of(0, 8), 999])) == 0

    def test_recomputed_blocks_close_the_hole(self) -> None:
        group = windows(window=6, n_slots=lease_slots(6, BLOCK, STEP))
        store = make_store(group)
        serve(store, run_of(0, 40))
        assert serve(store, [*run_of(0, 8), 999]) == 0
        assert group.stats().unresumable_tokens == 8
        assert store.probe(NS, Tokens([*run_of(0, 8), 998])) == 8

    def test_a_shared_block_is_copied_in_both_places(self) -> None:
        store = make_store(windows(window=6))
        serve(store, run_of(0, 10))
        lease = admit(store, [*run_of(0, 9), 999])
        block, slot = lease.table[-1], BlockId(held(lease).slots[-1])
        assert plan(store, lease, 1) == [
            (When.FIRST, CopyBlock(block, lease.table[-1], 1)),
            (When.FIRST, CopyBlock(slot, BlockId(held(lease).slots[-1]), 1, group=0)),
        ]

    def test_no_more_leases_than_there_is_room_for(self) -> None:
        store = make_store(windows(window=6, n_slots=2 * lease_slots(6, BLOCK, STEP)))
        leases = [admit(store, run_of(100 * i, 4)) for i in range(2)]
        assert isinstance(store.admit(NS, Tokens(run_of(500, 4))), Refusal)
        store.release(leases[0])
        assert isinstance(store.admit(NS, Tokens(run_of(500, 4))), Lease)


class TestRecurrent:
    def test_a_new_sequence_starts_from_nothing(self) -> None:
        store = make_store(states())
        lease = admit(store, run_of(0, 5))
        [state] = lease.group_states
        assert isinstance(state, RecurrentState)
        assert compute(store, lease, 4)[0] == ResetState(state.slot)

    def test_a_step_stops_before_the_prompts_last_token(self) -> None:
        store = make_store(states())
        lease = admit(store, run_of(0, 15))
        assert lease.max_step_tokens(15) == 14

    def test_a_step_that_is_split_there_saves_in_between_and_at_its_end(self) -> None:
        store = make_store(states())
        lease = admit(store, run_of(0, 17))
        assert lease.max_step_tokens(17, sampled_position=16) == 17
        _, *saves = plan(store, lease, 17, sampled_position=16)
        assert [when for when, _ in saves] == [When.AFTER_PREFILLS, When.LAST]
        assert all(isinstance(op, CopyState) for _, op in saves)
        store.commit(lease, 17)
        invariants.check(store)
        assert store.probe(NS, Tokens(run_of(0, 17))) == 16
        store.donate(lease)
        assert store.probe(NS, Tokens([*run_of(0, 17), 999])) == 17
        invariants.check_idle(store)

    def test_a_step_that_ends_before_the_split_is_not_split(self) -> None:
        store = make_store(states(interval_tokens=8))
        lease = admit(store, run_of(0, 17))
        assert lease.max_step_tokens(17, sampled_position=16) == 8
        _, *saves = plan(store, lease, 8, sampled_position=16)
        assert [when for when, _ in saves] == [When.LAST]

    def test_a_resend_hits_all_but_the_last_token(self) -> None:
        store = make_store(states())
        assert serve(store, run_of(0, 15)) == 0
        assert serve(store, run_of(0, 15)) == 14

    @pytest.mark.parametrize("n_tokens", range(2, 60))
    def test_what_is_saved_while_the_step_before_is_in_flight_is_found(self, n_tokens: int) -> None:
        store, prompt = make_store(states()), run_of(0, n_tokens)
        lease = admit(store, prompt)
        ends = []
        while lease.planned_tokens < n_tokens:
            n_left = n_tokens - lease.planned_tokens
            n_step = lease.max_step_tokens(min(n_left, STEP), n_tokens - 1)
            store.plan(lease, n_step, n_tokens - 1)
            ends.append(lease.planned_tokens)
            if len(ends) > 1:
                store.commit(lease, ends[-2] - lease.written_tokens)
        store.commit(lease, n_tokens - lease.written_tokens)
        lease.tokens.append(999)
        store.plan(lease, 1)
        store.commit(lease, 1)
        store.donate(lease)
        invariants.check_idle(store)
        assert store.probe(NS, Tokens(prompt)) == n_tokens - 1

    def test_the_next_turn_goes_on_where_the_last_ended(self) -> None:
        store = make_store(states())
        serve(store, run_of(0, 15), answer=[100, 101, 102])
        assert serve(store, [*run_of(0, 15), 100, 101, 102, 200, 201]) == 18

    def test_a_turn_that_drops_the_answer_hits_the_whole_prompt(self) -> None:
        store = make_store(states())
        serve(store, run_of(0, 15), answer=[100, 101, 102])
        assert serve(store, [*run_of(0, 15), 200, 201]) == 15

    def test_the_third_request_resumes_where_the_second_diverged(self) -> None:
        store = make_store(states())
        serve(store, [*run_of(0, 21), 100, 101])
        assert serve(store, [*run_of(0, 21), 200, 201]) == 0
        assert serve(store, [*run_of(0, 21), 300, 301]) == 21

    def test_a_head_of_less_than_a_block_in_common_is_not_worth_a_step(self) -> None:
        store = make_store(states())
        serve(store, [*run_of(0, 3), 100, 101, 102])
        lease = admit(store, [*run_of(0, 3), 200, 201, 202])
        assert lease.max_step_tokens(6, sampled_position=5) == 6

    @pytest.mark.parametrize("in_common", range(1, 13))
    def test_a_head_in_common_is_worth_a_step_from_one_block_on(self, in_common: int) -> None:
        store = make_store(states())
        head = run_of(0, in_common)
        serve(store, [*head, 100, 101, 102])
        serve(store, [*head, 200, 201, 202])
        assert serve(store, [*head, 300, 301, 302]) == (in_common if in_common >= 4 else 0)

    def test_a_long_prompt_is_saved_on_the_way(self) -> None:
        store = make_store(states(interval_tokens=8))
        serve(store, run_of(0, 30))
        assert store.probe(NS, Tokens([*run_of(0, 21), 999])) == 16

    def test_somebody_who_waits_finds_a_state(self) -> None:
        store = make_store(states())
        lease = admit(store, run_of(0, 30))
        compute(store, lease, 4)
        lease.checkpoint(12)
        compute(store, lease)
        assert store.probe(NS, Tokens([*run_of(0, 12), 999])) == 12

    def test_a_restored_state_is_a_copy(self) -> None:
        """The saved one stays for whoever comes next."""
        store = make_store(states())
        serve(store, run_of(0, 15))
        leases = [admit(store, [*run_of(0, 15), other]) for other in (8, 9)]
        held = [state for lease in leases for state in lease.group_states]
        running = [state.slot for state in held if isinstance(state, RecurrentState)]
        ops = [op for op in compute(store, leases[0]) if isinstance(op, CopyState)]
        restores = [op for op in ops if op.target in running]
        assert [op.target for op in restores] == running
        [saved] = {op.source for op in restores}
        assert saved not in running
        assert [lease.cached_tokens for lease in leases] == [15, 15]

    def test_states_go_least_recently_used_first_and_leave_the_blocks(self) -> None:
        group = states(n_saved=2, n_running=1)
        store = make_store(group)
        serve(store, run_of(0, 15))
        cached_blocks = store.pool.n_evictable
        serve(store, run_of(500, 15))
        assert store.probe(NS, Tokens(run_of(0, 15))) == 0
        assert store.probe(NS, Tokens(run_of(500, 15))) == 14
        assert store.pool.n_evictable == 2 * cached_blocks
        assert group.stats().unresumable_tokens == 0, "a look is no admission"
        assert serve(store, run_of(0, 15)) == 0
        assert (group.stats().unresumable_tokens, group.stats().evictions) == (14, 4)

    def test_a_tail_in_anothers_block_leaves_its_states_there(self) -> None:
        store = make_store(states())
        serve(store, run_of(0, 16))
        serve(store, run_of(0, 14))
        assert store.probe(NS, Tokens([*run_of(0, 14), 999])) == 14

    def test_with_no_room_for_copies_the_next_turn_goes_on_in_the_state_itself(self) -> None:
        store = make_store(states(n_saved=0, n_running=1))
        assert serve(store, run_of(1, 10), answer=[90, 91]) == 0
        longer = [*run_of(1, 10), 90, 91, 92]
        assert serve(store, longer) == 12
        assert serve(store, longer) == 0, "the state has moved on"

    def test_nothing_is_saved_where_nothing_may_be(self) -> None:
        store = make_store(states(n_saved=0))
        lease = admit(store, run_of(0, 15))
        assert lease.max_step_tokens(15) == 15


class TestTogether:
    def test_all_groups_resume_at_one_position(self) -> None:
        store = make_store(windows(window=6), states(interval_tokens=8))
        serve(store, run_of(0, 30))
        assert store.probe(NS, Tokens([*run_of(0, 21), 999])) == 16
        assert serve(store, [*run_of(0, 21), 999]) == 16
        window, saved = (group.stats() for group in store.groups)
        assert (window.unresumable_tokens, saved.unresumable_tokens) == (0, 5)
        assert serve(store, [*run_of(0, 21), 998]) == 21

    def test_a_clear_counts_what_every_group_gave_back(self) -> None:
        store = make_store(windows(8), states())
        serve(store, run_of(1, 10))
        window, saved = (group.stats().cached for group in store.groups)
        assert window > 0 < saved
        store.clear()
        cleared = forget_cleared(store, StorageBytes(block=32, slots=(100, 1000), arenas=0), 99)
        assert cleared == Cleared(3, 3 * 32 + window * 100 + saved * 1000)

    def test_what_sharing_saves_counts_windows_and_no_state_twice(self) -> None:
        store = make_store(windows(8), states())
        sizes = StorageBytes(block=32, slots=(100, 1000), arenas=0)
        serve(store, run_of(1, 12))
        alone = admit(store, [*run_of(1, 12), 7])
        assert self.saved_bytes(store, sizes) == 0
        admit(store, [*run_of(1, 12), 8])
        assert len(alone.table[:3]) == 3, "of which the window sees two"
        assert self.saved_bytes(store, sizes) == 3 * 32 + 2 * 100

    def saved_bytes(self, store: KVStore, sizes: StorageBytes) -> int:
        groups = [group.stats() for group in store.groups]
        return saved_bytes(store.pool.n_saved, groups, sizes)


class TestRounded:
    """Where states are rounded they are saved, and nowhere else."""

    def store(self, n_saved: int = 20) -> KVStore:
        return make_store(RoundedGroup(4, n_saved, BLOCK, interval_tokens=8))

    def test_steps_end_where_a_state_is_rounded_and_saved(self) -> None:
        store = self.store()
        lease = admit(store, run_of(0, 19))
        assert [lease.max_step_tokens(n) for n in (19, 8, 3)] == [8, 8, 3]
        rounded, saved = plan(store, lease, 8)[1:]
        assert isinstance(rounded[1], RoundState)
        assert isinstance(saved[1], CopyState)
        assert (rounded[1].slot, rounded[0], saved[0]) == (saved[1].source, When.LAST, When.LAST)

    def test_before_the_decodes_a_state_is_rounded_without_the_last_token(self) -> None:
        store = self.store()
        lease = admit(store, run_of(0, 9))
        assert lease.max_step_tokens(9, sampled_position=8) == 9
        ops = plan(store, lease, 9, sampled_position=8)[1:]
        assert [(when, type(op)) for when, op in ops] == [
            (When.AFTER_PREFILLS, RoundState),
            (When.AFTER_PREFILLS, CopyState),
        ]

    def test_requests_resume_at_intervals_of_prompts_and_of_answers(self) -> None:
        store, answer = self.store(), [*range(100, 116)]
        serve(store, run_of(0, 21), answer)
        for n_tokens, found in ((7, 0), (15, 8), (16, 8), (17, 16), (21, 16)):
            assert store.probe(NS, Tokens(run_of(0, n_tokens))) == found
        assert store.probe(NS, Tokens([*run_of(0, 21), *answer, 999])) == 32

    def test_a_state_is_rounded_although_there_is_no_room_to_save_it(self) -> None:
        store = self.store(n_saved=0)
        lease = admit(store, run_of(0, 20))
        ops = compute(store, lease)
        assert [type(op) for op in ops] == [ResetState, RoundState, RoundState]

    def test_a_draft_does_not_go_beyond_where_a_state_is_rounded(self) -> None:
        store = self.store()
        lease = admit(store, run_of(0, 12))
        compute(store, lease)
        lease.tokens.append(100)
        store.plan(lease, 1)
        assert isinstance(store.plan_draft(lease, 3), Refusal)
        assert store.plan_draft(lease, 2) is None

    def test_a_draft_does_not_begin_where_a_state_is_rounded(self) -> None:
        """The state would be rounded with the draft tokens, at the end of the step."""
        store = self.store(n_saved=1)
        other, lease = admit(store, run_of(50, 9)), admit(store, run_of(0, 7))
        plan(store, other, 8)  # holds the only slot for a saved state
        compute(store, lease)
        lease.tokens.append(100)
        [rounded] = plan(store, lease, 1)
        assert isinstance(rounded[1], RoundState)
        store.release(other)  # the same step has preempted it, so that there is a slot again
        assert isinstance(store.plan_draft(lease, 3), Refusal)


class TestDrafts:
    """A state cannot be rid of tokens: a snapshot is taken, and the lease returns to it."""

    def drafted(self, group: RecurrentGroup) -> tuple[KVStore, Lease, CopyState]:
        """A lease that has written 15 tokens and decodes another with a draft of three."""
        store = make_store(group)
        lease = admit(store, run_of(0, 15))
        compute(store, lease)
        lease.tokens.append(100)
        store.plan(lease, 1)
        assert store.plan_draft(lease, 3) is None
        [(when, snapshot)] = store.take_ops()
        assert when is When.FIRST
        assert isinstance(snapshot, CopyState)
        return store, lease, snapshot

    def slot(self, lease: Lease) -> SlotId:
        [state] = lease.group_states
        assert isinstance(state, RecurrentState)
        return state.slot

    def test_a_rejected_draft_leaves_the_lease_as_it_was_before_the_step(self) -> None:
        store, lease, snapshot = self.drafted(states())
        lease.tokens.append(101)
        store.commit(lease, n_computed=4, n_accepted=2)
        assert (lease.written_tokens, lease.planned_tokens) == (15, 15)
        assert self.slot(lease) == snapshot.target
        assert TablePatch(0, 0, (snapshot.target,)) in lease.take_patches()
        invariants.check(store)
        compute(store, lease)  # the accepted tokens, again
        store.donate(lease)
        assert store.probe(NS, Tokens([*run_of(0, 15), 100, 101, 102])) == 17
        invariants.check_idle(store)

    def test_an_accepted_draft_frees_the_snapshot(self) -> None:
        group = states()
        store, lease, snapshot = self.drafted(group)
        for token_id in (101, 102, 103):
            lease.tokens.append(token_id)
        store.commit(lease, n_computed=4, n_accepted=4)
        assert (lease.written_tokens, lease.planned_tokens) == (19, 19)
        assert self.slot(lease) == snapshot.source
        assert group.stats().held == 1
        assert store.probe(NS, Tokens([*run_of(0, 15), 100, 101, 102])) == 15
        store.donate(lease)
        assert store.probe(NS, Tokens([*run_of(0, 15), 100, 101, 102, 103, 104])) == 19
        invariants.check_idle(store)

    def test_a_lease_that_ends_in_the_step_leaves_its_snapshot(self) -> None:
        store, lease, _ = self.drafted(states())
        store.donate(lease)
        assert store.take_ops() == []
        assert store.probe(NS, Tokens([*run_of(0, 15), 100, 101])) == 15
        invariants.check_idle(store)

    def test_without_a_slot_for_the_snapshot_no_draft_is_planned(self) -> None:
        store = make_store(states(n_saved=0))
        lease = admit(store, run_of(0, 15))
        compute(store, lease)
        lease.tokens.append(100)
        store.plan(lease, 1)
        assert isinstance(store.plan_draft(lease, 3), Refusal)
        assert lease.planned_tokens == 16

    def test_where_the_step_saves_a_state_no_draft_is_planned(self) -> None:
        store = make_store(states())
        lease = admit(store, run_of(0, 15))
        compute(store, lease, 14)
        store.plan(lease, 1)
        assert isinstance(store.plan_draft(lease, 3), Refusal)


@pytest.mark.parametrize("n_drafts", [1, 6])
def test_the_snapshot_for_a_draft_comes_after_what_is_rolled_back(n_drafts: int) -> None:
    """It may go to the slot that is rolled back. For one draft no block is new."""
    store = make_store(states(n_saved=2, n_running=2))
    ended, other = admit(store, run_of(1, 5)), admit(store, run_of(100, 5))
    for lease in (ended, other):
        compute(store, lease)
        lease.tokens.append(3)
    store.plan(ended, 1)
    store.commit(ended, 1)
    ended.tokens.append(3)
    store.plan(ended, 1)
    store.take_ops()
    store.donate(ended)
    store.clear()
    store.plan(other, 1)
    assert store.plan_draft(other, n_drafts) is None
    *rolled_back, (_, snapshot) = store.take_ops()
    assert isinstance(snapshot, CopyState)
    assert [type(op) for _, op in rolled_back] == [RollBackState]


def test_a_failed_step_leaves_no_state_that_it_was_to_copy() -> None:
    """A lease that is preempted in the plan that admits it donates a state that is not copied yet.
    Meanwhile the saved state, from which it resumes, may have been evicted.
    """
    store = make_store(states(n_saved=0, n_running=2))
    serve(store, run_of(0, 8))
    resumed = admit(store, [*run_of(0, 8), 9])
    assert resumed.cached_tokens == 8
    other = admit(store, run_of(50, 8))  # takes the slot of the saved state
    store.donate(resumed)
    store.revoke(store.take_ops())
    store.release(other)
    assert store.probe(NS, Tokens([*run_of(0, 8), 9])) == 0
    invariants.check_idle(store)
