"""The bytes of blocks and states, as the disk tier stores them.

The bytes of a block are those of its layers in turn, K then V, each `[kv_heads, block_size, dim]`;
those of a state are those of its arrays in turn. All are in C order, with nothing between them, and
in the machine's byte order. `FORMAT` changes whenever any of this does.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from math import prod
from typing import TypeAlias

import mlx.core as mx
import numpy as np

from engine.mlx_backend.storage.arena import Arena, ArenaError, LayerShape
from engine.mlx_backend.storage.state_arena import StateArena, StateShape
from kvstore.types import BlockId, SlotId

FORMAT = "kv1"

_WORDS = (mx.uint64, mx.uint32, mx.uint16, mx.uint8)

Form: TypeAlias = Sequence[tuple[tuple[int, ...], mx.Dtype]]
"""Shape and dtype of each array that something is made of."""


class Packed:
    """Equal things on their way to bytes, laid out and perhaps not yet computed.

    Each of `arrays` is `[things, ...]`.
    """

    def __init__(self, arrays: Iterable[mx.array], n_things: int) -> None:
        pieces = [mx.contiguous(array.reshape(n_things, -1)) for array in arrays if array.size]
        word = _widest([piece.nbytes // n_things for piece in pieces])
        pieces = [piece.view(word) for piece in pieces]
        self._joined = mx.concatenate(pieces, axis=1) if pieces else mx.zeros((n_things, 0), word)

    def arrays(self) -> list[mx.array]:
        """What must have been computed before `read`."""
        return [self._joined] if self._joined.size else []

    def read(self) -> list[memoryview]:
        """The bytes of each, where MLX has them: nothing is copied, and all of it stays in memory
        until all of them are let go. MLX finds such memory again, and it need not be touched anew.
        """
        rows = np.asarray(self._joined).view(np.uint8)
        return [memoryview(row).toreadonly() for row in rows]


def pack_blocks(arena: Arena, blocks: list[BlockId], n_tokens: list[int]) -> Packed:
    """The first tokens of blocks; behind them, to the end of each block, all is zero.

    Refers to the arena's arrays until it has been computed: a write before that copies them.
    Raises ArenaError for an unknown block.
    """
    contents = arena.contents(blocks, n_tokens) if blocks else []
    return Packed((array for pair in contents for array in pair), len(blocks))


def fill_blocks(arena: Arena, contents: Mapping[BlockId, bytes]) -> None:
    """Overwrite whole blocks. The bytes are copied while the device computes; then this waits until
    it is idle, and until they are in place.

    Raises ArenaError for an unknown block or another size, before anything is written.
    """
    if not contents:
        return
    form = _block_form(arena)
    for block, data in contents.items():
        arena.check(block)
        _check_size(data, form)
    runs = [
        (run[0], list(_unpack([contents[block] for block in run], form)))
        for run in _neighbours(contents)
    ]
    mx.synchronize()  # what is in flight may refer to the arena's arrays, and they would be copied
    for first, arrays in runs:
        for layer, keys, values in zip(arena.layers, arrays[::2], arrays[1::2], strict=True):
            layer.put_blocks(first, keys, values)
    mx.eval(arena.arrays())  # now: evaluated and still on their way they would be copied, too


def pack_states(states: StateArena, slots: Sequence[SlotId]) -> Packed:
    """The states that slots hold now."""
    return Packed(states.read(slots) if slots else [], len(slots))


def fill_state(states: StateArena, slot: SlotId, data: bytes) -> None:
    """Let a slot hold a state. Raises ArenaError for another size."""
    form = [(shape.shape, shape.dtype) for shape in states.shapes]
    _check_size(data, form)
    states.write([slot], list(_unpack([data], form)))


def describe_layers(layers: Iterable[LayerShape]) -> str:
    """Equal neighbours once: `24*8x128float16+128float16` is 24 layers of 8 KV heads of K and V."""
    return ",".join(
        f"{len(list(run))}*{layer.kv_heads}x{layer.key_dim}{_name(layer.key_dtype)}"
        f"+{layer.value_dim}{_name(layer.value_dtype)}"
        for layer, run in groupby(layers)
    )


def describe_states(shapes: Iterable[StateShape]) -> str:
    """Equal neighbours once: `2*16x64float32` is two arrays of a state."""
    return ",".join(
        f"{len(list(run))}*{'x'.join(map(str, shape.shape))}{_name(shape.dtype)}"
        for shape, run in groupby(shapes)
    )


def _block_form(arena: Arena) -> Form:
    form = []
    for shape in (layer.shape for layer in arena.layers):
        room = (shape.kv_heads, arena.block_size)
        form.append(((*room, shape.key_dim), shape.key_dtype))
        form.append(((*room, shape.value_dim), shape.value_dtype))
    return form


def _neighbours(blocks: Iterable[BlockId]) -> Iterator[list[BlockId]]:
    """Runs of blocks that lie one behind the other: what is put there is one operation a layer."""
    for _, run in groupby(enumerate(sorted(blocks)), lambda it: it[1] - it[0]):
        yield [block for _, block in run]


def _unpack(contents: Sequence[bytes], form: Form) -> Iterator[mx.array]:
    """The arrays of equal things, each `[things, ...]`."""
    offset = 0
    for shape, dtype in form:
        end = offset + _bytes(shape, dtype)
        pieces = b"".join([memoryview(data)[offset:end] for data in contents])
        array = mx.array(np.frombuffer(pieces, np.uint8)) if pieces else mx.zeros(0, mx.uint8)
        yield array.view(dtype).reshape(len(contents), *shape)
        offset = end


def _check_size(data: bytes, form: Form) -> None:
    expected = sum(_bytes(shape, dtype) for shape, dtype in form)
    if len(data) != expected:
        raise ArenaError(f"{len(data)} bytes to fill in where there are {expected}")


def _widest(sizes: Sequence[int]) -> mx.Dtype:
    """Of what so many bytes are made of: to join 4 MiB in eights takes 0.3 ms, in ones 1.2."""
    return next(word for word in _WORDS if not any(size % word.size for size in sizes))


def _bytes(shape: tuple[int, ...], dtype: mx.Dtype) -> int:
    return prod(shape) * dtype.size


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")
