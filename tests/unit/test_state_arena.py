"""The states of recurrent layers: what is read is what was written, and little else is kept."""

import mlx.core as mx
import pytest

from kvstore.actions import CopyState, ResetState
from kvstore.state_arena import StateArena, StateShape, state_bytes
from kvstore.types import SlotId

SHAPES = (StateShape((2, 3), mx.float32), StateShape((4,), mx.float16))
A, B, C, D = (SlotId(slot) for slot in range(4))


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
    arena = StateArena(SHAPES, 4)
    assert values(arena, B, A) == [0, 0]


def test_what_was_written_together_is_read_in_any_company() -> None:
    arena = StateArena(SHAPES, 4)
    arena.write([A, B, C], states(1, 2, 3))
    assert values(arena, A, B, C) == [1, 2, 3]
    assert values(arena, C, D, A) == [3, 0, 1]
    arena.write([C, D], states(30, 40))
    assert values(arena, A, B, C, D) == [1, 2, 30, 40]


def test_the_same_rows_in_the_same_order_are_handed_back_as_they_are() -> None:
    arena = StateArena(SHAPES, 4)
    arena.write([B, A], states(2, 1))
    first, second = arena.read([B, A]), arena.read([B, A])
    assert all(x is y for x, y in zip(first, second, strict=True))


def test_a_copy_keeps_what_its_source_held_then() -> None:
    arena = StateArena(SHAPES, 4)
    arena.write([A, B], states(1, 2))
    arena.carry_out(CopyState(B, C))
    arena.write([A, B], states(10, 20))
    assert values(arena, A, B, C) == [10, 20, 2]
    arena.carry_out(CopyState(C, A))
    arena.carry_out(ResetState(B))
    assert values(arena, A, B, C) == [2, 0, 2]


def test_a_copy_of_what_was_never_written_is_the_initial_state() -> None:
    arena = StateArena(SHAPES, 4)
    arena.write([A], states(7))
    arena.carry_out(CopyState(B, A))
    assert values(arena, A) == [0]


def test_slots_that_do_not_exist_are_refused() -> None:
    with pytest.raises(IndexError, match="state 4"):
        StateArena(SHAPES, 4).carry_out(ResetState(SlotId(4)))


def test_one_row_that_stays_does_not_keep_its_batch_in_memory() -> None:
    shape = StateShape((256, 1024), mx.float32)
    arena = StateArena([shape], 16)
    before = mx.get_active_memory()
    slots = [SlotId(slot) for slot in range(16)]
    arena.write(slots, [mx.ones((16, 256, 1024))])
    mx.eval(arena.unevaluated())
    for slot in slots[1:]:
        arena.carry_out(ResetState(slot))
        mx.eval(arena.unevaluated())
    assert mx.get_active_memory() - before < 2 * state_bytes([shape])


def test_a_slice_of_a_forwards_array_does_not_keep_that_in_memory() -> None:
    shape = StateShape((1, 1024), mx.float32)
    arena = StateArena([shape], 1)
    before = mx.get_active_memory()
    arena.write([A], [mx.ones((1, 512, 1024))[:, -1:]])
    mx.eval(arena.unevaluated())
    assert mx.get_active_memory() - before < 8 * state_bytes([shape])
