"""The arena: shapes and dtypes are checked, writes and copies land where they should."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from engine.mlx_backend.kv.arena import Arena, ArenaError, independent_copies
from engine.mlx_backend.kv.shape import LayerShape, block_bytes
from engine.values.settings import KVFormat
from kvstore.ops import CopyBlock
from kvstore.types import BlockId


def float32(kv_heads: int, key_dim: int, value_dim: int) -> LayerShape:
    return LayerShape(kv_heads, key_dim, value_dim, mx.float32, mx.float32)


UNEVEN = (float32(2, 4, 3), float32(1, 6, 6))
A, B, C = BlockId(0), BlockId(1), BlockId(2)


def small_arena(layers: tuple[LayerShape, ...] = UNEVEN) -> Arena:
    return Arena(layers, n_blocks=3, block_size=2)


def write(arena: Arena, blocks: list[int], slots: list[int], value: float) -> None:
    """Write `value` as K and twice that as V, one row of tokens."""
    for layer in arena.layers:
        shape = layer.shape
        keys = mx.full((1, shape.kv_heads, len(blocks), shape.key_dim), value)
        values = mx.full((1, shape.kv_heads, len(blocks), shape.value_dim), 2 * value)
        layer.write(
            arena.slot_mapping(mx.array(blocks), mx.array(slots), layer.heads), keys, values
        )


def read(arena: Arena, layer: int, blocks: list[int]) -> tuple[np.ndarray, np.ndarray]:
    store = arena.layers[layer]
    heads = arena.gather_ids(mx.array([blocks], dtype=mx.uint32), store.heads)
    keys, values = store.read(heads)
    return np.array(keys), np.array(values)


@pytest.mark.parametrize("layer", [0, 1])
def test_what_is_written_is_read_in_table_order(layer: int) -> None:
    arena = small_arena()
    write(arena, [C, C, A], [0, 1, 0], 1.0)
    write(arena, [B], [1], 5.0)
    keys, values = read(arena, layer, [C, A, B])
    shape = UNEVEN[layer]
    assert keys.shape == (1, shape.kv_heads, 6, shape.key_dim)
    assert values.shape == (1, shape.kv_heads, 6, shape.value_dim)
    assert keys[0, -1, :, 0].tolist() == [1, 1, 1, 0, 0, 5]
    assert values[0, -1, :, -1].tolist() == [2, 2, 2, 0, 0, 10]


def test_heads_are_not_mixed_up() -> None:
    arena = small_arena()
    keys = mx.array([[[[1.0] * 4], [[2.0] * 4]]])
    slot_mapping = arena.slot_mapping(mx.array([B]), mx.array([0]), arena.layers[0].heads)
    arena.layers[0].write(slot_mapping, keys, mx.zeros((1, 2, 1, 3)))
    assert read(arena, 0, [B])[0][0, :, 0, 0].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        (mx.zeros((1, 3, 1, 4)), mx.zeros((1, 2, 1, 3))),
        (mx.zeros((1, 2, 1, 4)), mx.zeros((1, 2, 1, 4))),
        (mx.zeros((1, 2, 2, 4)), mx.zeros((1, 2, 1, 3))),
        (mx.zeros((2, 1, 4)), mx.zeros((1, 2, 1, 3))),
        (mx.zeros((1, 2, 1, 4), mx.float16), mx.zeros((1, 2, 1, 3))),
        (mx.zeros((1, 2, 1, 4)), mx.zeros((1, 2, 1, 3), mx.bfloat16)),
    ],
)
def test_mismatches_are_refused_and_change_nothing(keys: mx.array, values: mx.array) -> None:
    arena = small_arena()
    slot_mapping = arena.slot_mapping(mx.array([A]), mx.array([0]), arena.layers[0].heads)
    with pytest.raises(ArenaError):
        arena.layers[0].write(slot_mapping, keys + 1, values + 1)
    assert not read(arena, 0, [A])[0].any()


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_keys_and_values_keep_their_own_dtypes(dtype: mx.Dtype) -> None:
    arena = Arena([LayerShape(1, 2, 4, mx.float32, dtype)], n_blocks=2, block_size=2)
    (layer,) = arena.layers
    slot_mapping = arena.slot_mapping(mx.array([0]), mx.array([0]), layer.heads)
    layer.clear(slot_mapping)
    layer.write(slot_mapping, mx.full((1, 1, 1, 2), 1 / 3), mx.ones((1, 1, 1, 4), dtype))
    arena.copy([CopyBlock(A, B, 2)])
    keys, values = layer.read(arena.gather_ids(mx.array([[1]], mx.uint32), layer.heads))
    assert (keys.dtype, values.dtype) == (mx.float32, dtype)
    assert float(keys[0, 0, 0, 0]) == float(mx.array(1 / 3))
    assert arena.bytes == 2 * 2 * (2 * 4 + 4 * dtype.size)


def test_copies_are_carried_out_in_order() -> None:
    arena = small_arena()
    for value, block in enumerate((A, B, C), start=1):
        write(arena, [block, block], [0, 1], float(value))
    arena.copy([CopyBlock(A, B, 2), CopyBlock(C, A, 2)])
    assert [read(arena, 1, [block])[0][0, 0, 0, 0] for block in (A, B, C)] == [3, 1, 3]
    arena.copy([CopyBlock(B, C, 2), CopyBlock(C, A, 2)])
    assert [read(arena, 1, [block])[0][0, 0, 0, 0] for block in (A, B, C)] == [1, 1, 1]


def test_what_lies_behind_the_copied_tokens_is_zero_even_where_it_was_nan() -> None:
    arena = small_arena()
    write(arena, [A, A], [0, 1], 5.0)
    write(arena, [A, B, B], [1, 0, 1], float("nan"))
    arena.copy([CopyBlock(A, B, 1)])
    assert read(arena, 0, [B])[0][0, 0, :, 0].tolist() == [5, 0]


def test_orders_that_depend_on_each_other_are_split() -> None:
    chain = [CopyBlock(A, B, 2), CopyBlock(C, A, 2), CopyBlock(A, C, 2)]
    assert independent_copies(chain) == [chain[:2], chain[2:]]
    rewritten = [CopyBlock(A, B, 2), CopyBlock(C, B, 2)]
    assert independent_copies(rewritten) == [rewritten[:1], rewritten[1:]]


def test_unknown_blocks_are_refused_before_anything_is_copied() -> None:
    arena = small_arena()
    write(arena, [A, A], [0, 1], 7.0)
    with pytest.raises(ArenaError, match="block 3"):
        arena.copy([CopyBlock(A, B, 2), CopyBlock(A, BlockId(3), 2)])
    assert not read(arena, 0, [B])[0].any()


@pytest.mark.device
@pytest.mark.parametrize("format", [KVFormat.FULL, KVFormat.Q8])
def test_writes_and_copies_are_in_place(format: KVFormat) -> None:
    """MLX's peak memory would rise by the pool's size if one were copied."""
    layers = [replace(float32(4, 64, 64), format=format)]
    arena = Arena(layers, n_blocks=256, block_size=32)
    pool_bytes = arena.layers[0].planes[0].nbytes
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for _ in range(3):
        slot_mapping = arena.slot_mapping(mx.array([5]), mx.array([7]), arena.layers[0].heads)
        arena.layers[0].write(slot_mapping, mx.ones((1, 4, 1, 64)), mx.ones((1, 4, 1, 64)))
        for read in arena.copy([CopyBlock(BlockId(5), BlockId(6), 2)]):
            mx.eval(read)
        mx.eval(arena.planes())
    assert mx.get_peak_memory() - before < pool_bytes / 4


@pytest.mark.parametrize("layers", [UNEVEN, (float32(2, 4, 4), float32(1, 4, 0))])
def test_an_arena_that_grows_keeps_what_it_holds(layers: tuple[LayerShape, ...]) -> None:
    """Blocks are written, copied and read before and after; so are those of no sequence."""
    arena = Arena(layers, n_blocks=12, block_size=2, first_blocks=3)
    for value, block in enumerate((A, B), start=1):
        write(arena, [block, block], [0, 1], float(value))
    write(arena, [arena.scratch], [0], 9.0)
    small = sum(plane.nbytes for plane in arena.planes())
    arena.grow(5)
    assert arena.n_allocated == 5
    assert sum(plane.nbytes for plane in arena.planes()) > small
    far = BlockId(4)
    arena.copy([CopyBlock(B, far, 1)])
    write(arena, [far], [1], 7.0)
    keys, values = read(arena, 0, [A, far, arena.blank])
    assert keys[0, 0, :, 0].tolist() == [1, 1, 2, 7, 0, 0]
    assert values[0, 0, :, 0].tolist() == [2, 2, 4, 14, 0, 0]
    arena.grow(6)
    assert arena.n_allocated == 7, "half as many again"
    arena.grow(12)
    assert arena.n_allocated == 12
    assert read(arena, 1, [A, far, arena.blank])[0][0, 0, :, 0].tolist() == [1, 1, 2, 7, 0, 0]


def test_sizes() -> None:
    assert block_bytes(UNEVEN, 2) == 2 * (2 * (4 + 3) + 12) * 4
    assert small_arena().bytes == 3 * block_bytes(UNEVEN, 2)
    with pytest.raises(ArenaError):
        Arena(UNEVEN, n_blocks=0, block_size=2)


def test_a_layer_may_keep_keys_alone() -> None:
    arena = small_arena((float32(1, 4, 0),))
    write(arena, [A, A], [0, 1], 3.0)
    arena.copy([CopyBlock(A, B, 1)])
    mx.eval(arena.planes())  # MLX divides by zero when it scatters nothing
    keys, values = read(arena, 0, [B])
    assert keys[0, 0, :, 0].tolist() == [3, 0]
    assert values.shape == (1, 1, 2, 0)


def test_without_layers_blocks_are_only_counted() -> None:
    arena = small_arena(())
    arena.copy([CopyBlock(A, B, 2)])
    assert arena.bytes == 0
    with pytest.raises(ArenaError, match="block 3"):
        arena.copy([CopyBlock(A, BlockId(3), 2)])


STRIDED = (
    replace(float32(1, 4, 3), stride=2),
    replace(float32(1, 5, 0), stride=8),
    float32(1, 2, 2),
)
"""In blocks of 4 tokens: two vectors a block, one for two blocks, and one for each token."""


def strided_arena() -> Arena:
    """Three blocks, with 1 in all slots of A, 2 in B's and 3 in C's."""
    arena = Arena(STRIDED, n_blocks=3, block_size=4)
    for layer in arena.layers:
        sizes = 1, 1, layer.block_size
        for block in (A, B, C):
            keys, values = (mx.full((*sizes, dim), block + 1.0) for dim, _ in layer.shape.vectors)
            slots = mx.arange(layer.block_size)
            blocks = mx.full(layer.block_size, block, mx.uint32)
            layer.write(arena.slot_mapping(blocks, slots, layer.heads), keys, values)
    return arena


def first_numbers(arena: Arena, blocks: list[int]) -> list[list[float]]:
    """Of each vector of K, layer by layer."""
    return [read(arena, layer, blocks)[0][0, 0, :, 0].tolist() for layer in range(len(STRIDED))]


def test_vectors_of_several_tokens_have_their_share_of_a_block() -> None:
    arena = strided_arena()
    assert first_numbers(arena, [C, A]) == [[3, 3, 1, 1], [3, 1], [3, 3, 3, 3, 1, 1, 1, 1]]
    assert [layer.shape.token_bytes for layer in arena.layers] == [14, 3, 16]
    assert arena.bytes == 3 * (2 * 4 * 7 + 1 * 4 * 5 + 4 * 4 * 4)


@pytest.mark.parametrize(
    ("n_tokens", "kept"), [(4, (2, 1, 4)), (3, (1, 0, 3)), (2, (1, 0, 2)), (1, (0, 0, 1))]
)
def test_a_copy_has_the_vectors_whose_last_token_is_copied(
    n_tokens: int, kept: tuple[int, ...]
) -> None:
    arena = strided_arena()
    mx.eval(arena.copy([CopyBlock(B, C, n_tokens)]))
    expected = [
        [2.0] * n + [0.0] * (layer.block_size - n)
        for n, layer in zip(kept, arena.layers, strict=True)
    ]
    assert first_numbers(arena, [C]) == expected
    assert first_numbers(arena, [A, B]) == [[1, 1, 2, 2], [1, 2], [1, 1, 1, 1, 2, 2, 2, 2]]


def test_a_block_is_cleared_with_all_its_vectors() -> None:
    arena = strided_arena()
    arena.clear(mx.array([B], mx.uint32))
    assert first_numbers(arena, [A, B, C]) == [
        [1, 1, 0, 0, 3, 3],
        [1, 0, 3],
        [1, 1, 1, 1, 0, 0, 0, 0, 3, 3, 3, 3],
    ]


@pytest.mark.parametrize(("stride", "block_size"), [(2, 3), (6, 4), (4, 6)])
def test_vectors_that_do_not_end_with_blocks_are_refused(stride: int, block_size: int) -> None:
    with pytest.raises(ArenaError, match=f"vectors of {stride} do not fit"):
        Arena([replace(float32(1, 4, 4), stride=stride)], 2, block_size)
