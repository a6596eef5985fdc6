"""The states of recurrent layers: what is read is what was written, and little else is kept."""

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.mlx_backend.kv.states import ArrayShape, StateArena, StateBytes, state_bytes
from kvstore.ops import CopyState, ResetState, RollBackState, RoundState
from kvstore.sizes import StateCounts
from kvstore.types import SlotId

SHAPES = (ArrayShape((2, 3), mx.float32), ArrayShape((4,), mx.float16))
A, B, C, D = (SlotId(slot) for slot in range(4))


def an_arena() -> StateArena:
    """With four slots, for states that are saved as they are."""
    return StateArena(SHAPES, SHAPES, StateCounts(2, 2))


def states(*values: float) -> list[mx.array]:
    """States side by side, each full of one value."""
    rows = mx.array(values)
    return [
        mx.broadcast_to(
            rows.reshape(-1, *[1] * len(shape.shape)), (len(values), *shape.shape)
        ).astype(shape.dtype)
        for shape in SHAPES
    ]


def values(arena: StateArena, *slots: SlotId) -> list[float]:
    """The value that every number of each state has."""
    arrays = arena.read(slots)
    for array, shape in zip(arrays, SHAPES, strict=True):
        assert array.shape == (len(slots), *shape.shape)
        assert array.dtype == shape.dtype
        flat = array.reshape(len(slots), -1)
        assert (flat == arrays[0].reshape(len(slots), -1)[:, :1]).all()
    return [float(value) for value in arrays[0][:, 0, 0]]


def test_slots_begin_with_zeros() -> None:
    arena = an_arena()
    assert values(arena, B, A) == [0, 0]


def test_what_was_written_together_is_read_in_any_company() -> None:
    arena = an_arena()
    arena.write([A, B, C], states(1, 2, 3))
    assert values(arena, A, B, C) == [1, 2, 3]
    assert values(arena, C, D, A) == [3, 0, 1]
    arena.write([C, D], states(30, 40))
    assert values(arena, A, B, C, D) == [1, 2, 30, 40]


def test_the_same_rows_in_the_same_order_are_handed_back_as_they_are() -> None:
    arena = an_arena()
    arena.write([B, A], states(2, 1))
    first, second = arena.read([B, A]), arena.read([B, A])
    assert all(x is y for x, y in zip(first, second, strict=True))


def test_a_copy_keeps_what_its_source_held_then() -> None:
    arena = an_arena()
    arena.write([A, B], states(1, 2))
    arena.execute(CopyState(B, C))
    arena.write([A, B], states(10, 20))
    assert values(arena, A, B, C) == [10, 20, 2]
    arena.execute(CopyState(C, A))
    arena.execute(ResetState(B))
    assert values(arena, A, B, C) == [2, 0, 2]


def test_a_copy_of_what_was_never_written_is_the_initial_state() -> None:
    arena = an_arena()
    arena.write([A], states(7))
    arena.execute(CopyState(B, A))
    assert values(arena, A) == [0]


def test_slots_that_do_not_exist_are_refused() -> None:
    with pytest.raises(IndexError, match="state 4"):
        an_arena().execute(ResetState(SlotId(4)))


def test_two_copies_and_their_source_go_their_own_ways() -> None:
    arena = an_arena()
    arena.write([A, B], states(1, 2))
    arena.execute(CopyState(B, C))
    arena.execute(CopyState(C, D))
    arena.execute(ResetState(A))
    assert values(arena, D, A, C, B) == [2, 0, 2, 2]
    arena.write([C], states(3))
    arena.write([A], states(4))
    assert values(arena, A, B, C, D) == [4, 2, 3, 2]


def test_a_row_that_leaves_costs_nothing() -> None:
    arena = an_arena()
    arena.write([A, B, C], states(1, 2, 3))
    arena.unevaluated()
    arena.execute(ResetState(C))
    assert arena.unevaluated() == []


def test_a_copy_takes_a_row_of_its_own_and_shares_one_that_is_alone() -> None:
    """Else the state where somebody stopped would keep those of all who decoded beside it."""
    arena = an_arena()
    arena.write([A, B, C], states(1, 2, 3))
    arena.unevaluated()
    arena.execute(CopyState(B, D))
    assert {array.shape[0] for array in arena.unevaluated()} == {1}
    arena.execute(CopyState(D, A))
    assert arena.unevaluated() == []
    assert values(arena, A, B, C, D) == [2, 2, 3, 2]


@given(st.data())
def test_slots_hold_what_a_dictionary_would(data: st.DataObject) -> None:
    arena, expected = an_arena(), dict.fromkeys((A, B, C, D), 0.0)
    one, several = st.sampled_from(tuple(expected)), st.permutations(tuple(expected))
    for number in range(1, data.draw(st.integers(1, 30))):
        match data.draw(st.sampled_from(("write", "copy", "reset", "read"))):
            case "write":
                slots = data.draw(several)[: data.draw(st.integers(1, 4))]
                arena.write(slots, states(*(number + slot / 8 for slot in slots)))
                expected |= {slot: number + slot / 8 for slot in slots}
            case "copy":
                source, target = data.draw(one), data.draw(one)
                arena.execute(CopyState(source, target))
                expected[target] = expected[source]
            case "reset":
                slot = data.draw(one)
                arena.execute(ResetState(slot))
                expected[slot] = 0.0
            case _:
                slots = data.draw(several)[: data.draw(st.integers(1, 4))]
                assert values(arena, *slots) == [expected[slot] for slot in slots]


@pytest.mark.device
def test_no_more_states_are_in_memory_than_there_are_slots() -> None:
    """Each batch leaves a row behind, as a sequence that ends does."""
    shape, n_slots = ArrayShape((256, 1024), mx.float32), 16
    arena = StateArena([shape], [shape], StateCounts(n_slots // 4, n_slots - n_slots // 4))
    before = mx.get_active_memory()
    slots = [SlotId(slot) for slot in range(n_slots)]
    for n_rows in range(n_slots, 0, -1):
        arena.begin_step()
        arena.write(slots[:n_rows], [mx.full((n_rows, 256, 1024), float(n_rows))])
        mx.eval(arena.unevaluated())
        mx.synchronize()  # a GPU gives back what a command buffer used when that has completed
        most = n_slots + 1 + n_rows + 1  # what the step has replaced, in its batch
        assert mx.get_active_memory() - before <= most * state_bytes([shape])
    assert [float(arena.read([slot])[0][0, 0, 0]) for slot in slots] == [*range(1, n_slots + 1)]


@pytest.mark.device
def test_a_slice_of_a_forwards_array_does_not_keep_that_in_memory() -> None:
    shape = ArrayShape((1, 1024), mx.float32)
    arena = StateArena([shape], [shape], StateCounts(1, 0))
    before = mx.get_active_memory()
    arena.write([A], [mx.ones((1, 512, 1024))[:, -1:]])
    mx.eval(arena.unevaluated())
    mx.synchronize()
    assert mx.get_active_memory() - before < 8 * state_bytes([shape])


def test_a_slot_can_be_rolled_back_to_before_the_latest_step() -> None:
    arena = an_arena()
    for value in (1, 2):
        arena.begin_step()
        arena.write([A, B], states(value, 10 * value))
    arena.begin_step()
    arena.write([A, B], states(3, 30))
    arena.write([A], states(4))
    arena.execute(RollBackState(A))
    assert values(arena, A, B) == [2, 30]


def test_a_slot_that_the_latest_step_did_not_write_is_what_it_was() -> None:
    """A step may fail before it comes to a row's forward."""
    arena = an_arena()
    arena.begin_step()
    arena.write([A], states(1))
    arena.begin_step()
    arena.execute(RollBackState(A))
    assert values(arena, A) == [1]


HALVES = tuple(ArrayShape(shape.shape, mx.bfloat16) for shape in SHAPES)
"""How states of `SHAPES` may be saved."""

FINE = 1 + 2**-10
"""A float16, and no bfloat16."""


def test_a_rounded_state_and_its_copies_are_stored_as_they_are_saved() -> None:
    arena = StateArena(SHAPES, HALVES, StateCounts(2, 2))
    arena.write([A, B], states(FINE, FINE))
    arena.execute(RoundState(A))
    arena.execute(CopyState(A, C))
    assert values(arena, A, B, C) == [1, FINE, 1]
    for array, half in zip(arena.read_saved([C, A]), HALVES, strict=True):
        assert array.dtype == half.dtype
        assert (array[0] == array[1]).all()


def test_what_is_computed_from_a_rounded_state_has_all_its_digits() -> None:
    arena = StateArena(SHAPES, HALVES, StateCounts(2, 2))
    arena.write([A], states(FINE))
    arena.execute(RoundState(A))
    arena.write([A], [array * FINE for array in arena.read([A])])
    assert values(arena, A) == [FINE]


def test_a_state_that_was_read_as_saved_can_be_filled_in_again() -> None:
    arena = StateArena(SHAPES, HALVES, StateCounts(2, 2))
    arena.write([A], states(FINE))
    arena.write([B], arena.read_saved([A]))
    assert values(arena, B) == [1]


def test_what_float16_cannot_hold_becomes_its_largest_number() -> None:
    shape = ArrayShape((2,), mx.float32)
    arena = StateArena([shape], [ArrayShape((2,), mx.float16)], StateCounts(1, 0))
    arena.write([A], [mx.array([[1e6, -mx.inf]])])
    arena.execute(RoundState(A))
    assert arena.read([A])[0].tolist() == [[65504, -65504]]


@pytest.mark.device
def test_rounded_states_take_half_the_memory() -> None:
    shape, half = ArrayShape((256, 1024), mx.float32), ArrayShape((256, 1024), mx.float16)
    counts = StateCounts(running=1, saved=15)
    arena = StateArena([shape], [half], counts)
    before = mx.get_active_memory()
    for slot in range(1, counts.total):
        arena.begin_step()
        arena.write([A], [mx.full((1, 256, 1024), float(slot))])
        arena.execute(RoundState(A))
        arena.execute(CopyState(A, SlotId(slot)))
        mx.eval(arena.unevaluated())
        mx.synchronize()
    arena.begin_step()
    most = StateBytes(shape.bytes, half.bytes).total(counts)
    assert mx.get_active_memory() - before <= most
    assert [values_of[0, 0].item() for values_of in arena.read([SlotId(3), SlotId(9)])[0]] == [3, 9]
