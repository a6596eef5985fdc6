"""Pieces of attention against MLX's own, on shapes that the golden models do not reach."""

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from engine.mlx_backend.cpu import cascade
from engine.mlx_backend.cpu.cascade import CascadeAttention, plan_work
from engine.mlx_backend.cpu.tiles import TILE_KEYS, TILE_SCORES, TWO_STREAM_SCORES, TilePlan
from engine.mlx_backend.kv.arena import Arena
from engine.mlx_backend.kv.shape import LayerShape
from engine.mlx_backend.model.attention import BlockAttention
from engine.mlx_backend.model.rows import ArenaForward, RowGroup, TokenSpan, table_width, work_list
from engine.mlx_backend.model.views import LayerView
from tests.devices import cpu_attention
from tests.unit import attention_reference as reference

pytestmark = cpu_attention

HEADS = 4
BLOCK_SIZE = 16
TILE_QUERIES = TILE_SCORES // (TILE_KEYS * HEADS)
TWO_STREAM_KEYS = TWO_STREAM_SCORES // TILE_QUERIES


def layer(dtype: mx.Dtype = mx.float32, value_dim: int = 8) -> LayerShape:
    return LayerShape(2, 16, value_dim, dtype, dtype)


def streams() -> tuple[mx.Stream, mx.Stream]:
    device = mx.default_device()
    return mx.default_stream(device), mx.new_stream(device)


def view_of(group: RowGroup, attention: BlockAttention | None) -> LayerView:
    """The view of an arena's first layer in a forward of one group."""
    forward = ArenaForward([group], stands_in=False)
    return LayerView(group.arena.layers[0], forward, None, [attention])


@pytest.mark.parametrize(
    "chunks",
    [
        [(0, 1)],
        [(0, TILE_QUERIES)],
        [(5, TILE_QUERIES + 3)],
        [(TILE_KEYS - 20, 50)],
        [(TILE_KEYS, 2)],
        [(0, 7), (40, 3), (TILE_KEYS + 9, 12)],
        [(TWO_STREAM_KEYS, TILE_QUERIES - 20)],
        [(TWO_STREAM_KEYS, 2 * TILE_QUERIES + 1)],
    ],
)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(mx.float32, 1e-5), (mx.float16, 2e-3), (mx.bfloat16, 2e-2)]
)
def test_tiled_attention_equals_the_model_s_own(
    chunks: list[tuple[int, int]], dtype: mx.Dtype, tolerance: float
) -> None:
    arena = Arena([layer(dtype)], n_blocks=300, block_size=BLOCK_SIZE)
    fill(arena)
    spans, used = [], 0
    for start, length in chunks:
        n_blocks = -(-(start + length) // BLOCK_SIZE)
        blocks = np.arange(used, used + n_blocks, dtype=np.uint32)[::-1]
        spans.append(TokenSpan(start, length, blocks))
        used += n_blocks
    forward = RowGroup(spans, arena)
    rows, length = forward.rows, forward.length
    queries, keys, values = (
        mx.random.normal((rows, heads, length, dim), key=mx.random.key(seed)).astype(dtype)
        for seed, (heads, dim) in enumerate([(HEADS, 16), (2, 16), (2, 8)])
    )
    view = view_of(forward, TilePlan(forward, streams()))
    fetched = view.update_and_fetch(keys, values)
    mask = view.make_mask(length)
    found = view.attend(queries, *fetched, 0.25, mask)
    exact = [array.astype(mx.float32) for array in (queries, *fetched)]
    expected = mx.fast.scaled_dot_product_attention(*exact, scale=0.25, mask=forward.mask())
    assert found.dtype == dtype
    for row, (_, n_tokens) in enumerate(chunks):
        error = mx.abs(found[row, :, :n_tokens] - expected[row, :, :n_tokens]).max()
        assert float(error) < tolerance


def test_a_row_that_grows_is_read_in_few_sizes() -> None:
    """MLX finds its buffers again by their size. No key is missed, and few are read in vain."""
    arena = Arena([layer()], n_blocks=300, block_size=BLOCK_SIZE)
    blocks = np.arange(300, dtype=np.uint32)
    widths, gathered = set(), set()
    for stop in range(TILE_KEYS + 1, 2 * TILE_KEYS, 61):
        plan = TilePlan(RowGroup([TokenSpan(stop - 60, 60, blocks)], arena), streams())
        (tile,) = plan.tiles(0, HEADS)
        assert [span.first for span in tile.spans] == [0, TILE_KEYS]
        assert stop <= tile.spans[-1].last <= min(stop + 128, plan.n_blocks(0) * BLOCK_SIZE)
        widths.add(tile.spans[-1].last - TILE_KEYS)
        gathered.add(plan.n_blocks(0))
    assert len(widths) <= 16
    assert len(gathered) <= 8


def test_a_mask_that_is_not_its_own_is_left_to_the_model() -> None:
    arena = Arena([layer()], n_blocks=4, block_size=BLOCK_SIZE)
    forward = RowGroup([TokenSpan(0, 3, np.zeros(1, dtype=np.uint32))], arena)
    view = view_of(forward, TilePlan(forward, streams()))
    queries, keys, values = (
        mx.random.normal((1, heads, 3, dim), key=mx.random.key(seed))
        for seed, (heads, dim) in enumerate([(HEADS, 16), (2, 16), (2, 8)])
    )
    fetched = view.update_and_fetch(keys, values)
    for mask in (None, mx.ones((1, 1, 3, 3), mx.bool_)):
        found = view.attend(queries, *fetched, 1.0, mask)
        own = mx.fast.scaled_dot_product_attention(queries, *fetched, scale=1.0, mask=mask)
        assert mx.array_equal(found, own)


def last_stops(forward: RowGroup) -> npt.NDArray[np.int32]:
    """What the tokens see of rows of one token."""
    stops: npt.NDArray[np.int32] = forward.stops_host[:, None]
    return stops


@pytest.mark.parametrize("min_saved_blocks", [1, 1000])
@pytest.mark.parametrize("two_stream_numbers", [1, cascade.TWO_STREAM_NUMBERS])
def test_the_cascade_does_what_the_numpy_reference_does(
    min_saved_blocks: int, two_stream_numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of 1 to 200 blocks; three of them share two blocks, and two of these three more."""
    monkeypatch.setattr(cascade, "TWO_STREAM_NUMBERS", two_stream_numbers)
    arena = Arena([layer()], n_blocks=300, block_size=BLOCK_SIZE)
    fill(arena)
    free = iter(range(300))
    prefix, longer = take(free, 2), take(free, 3)
    tables = [
        prefix + take(free, 1),
        prefix + longer + take(free, 1),
        prefix + longer + take(free, 4),
        take(free, 1),
        take(free, 200),
        take(free, 3),
    ]
    stops = [len(table) * BLOCK_SIZE - n for n, table in enumerate(tables)]
    spans = [TokenSpan(stop - 1, 1, ids(table)) for stop, table in zip(stops, tables, strict=True)]
    forward = RowGroup(spans, arena)
    work = work_list(
        forward.host_table, forward.starts_host, forward.stops_host, BLOCK_SIZE, min_saved_blocks
    )
    assert len(work) == (8 if min_saved_blocks == 1 else 6)
    queries = mx.random.normal((6, 2, 2, 16), key=mx.random.key(1))
    (only,) = arena.layers
    plan = plan_work(arena, forward.host_table, last_stops(forward), work, streams())
    found = plan.attend(queries.reshape(6, HEADS, 1, 16), only, scale=1.0)
    assert found is not None
    found = found.reshape(6, 2, 2, -1)
    keys, values = (np.array(array) for array in only.blocks(mx.arange(arena.n_blocks)))
    expected = reference.attention(np.array(queries), keys, values, forward.host_table, work)
    np.testing.assert_allclose(np.array(found), expected, atol=1e-5)


@pytest.mark.parametrize("min_saved_blocks", [1, 1000])
@pytest.mark.parametrize("lengths", [(5, 5, 5, 5), (4, 1, 2, 3), (1, 1, 1, 1)])
@pytest.mark.parametrize("value_dim", [8, 16], ids=["two planes", "one"])
def test_each_of_a_rows_tokens_sees_what_comes_before_it(
    min_saved_blocks: int, lengths: tuple[int, ...], value_dim: int
) -> None:
    """Across blocks, after a prefix that rows share, and with others padded beside it."""
    arena = Arena([layer(value_dim=value_dim)], n_blocks=100, block_size=BLOCK_SIZE)
    fill(arena)
    free = iter(range(100))
    prefix = take(free, 2)
    tables = [prefix + take(free, 3), prefix + take(free, 1), take(free, 1), take(free, 12)]
    starts = [2 * BLOCK_SIZE + BLOCK_SIZE - 2, 2 * BLOCK_SIZE, 0, 7 * BLOCK_SIZE + 3]
    spans = [
        TokenSpan(start, length, ids(table))
        for start, length, table in zip(starts, lengths, tables, strict=True)
    ]
    forward = RowGroup(spans, arena)
    rows, length = forward.rows, forward.length
    queries, keys, values = (
        mx.random.normal((rows, heads, length, dim), key=mx.random.key(seed))
        for seed, (heads, dim) in enumerate([(HEADS, 16), (2, 16), (2, value_dim)])
    )
    view = view_of(forward, CascadeAttention(min_saved_blocks).prepare(forward, None))
    fetched = view.update_and_fetch(keys, values)
    found = view.attend(queries, *fetched, 0.25, view.make_mask(length))
    mask = forward.mask()
    expected = mx.fast.scaled_dot_product_attention(queries, *fetched, scale=0.25, mask=mask)
    np.testing.assert_allclose(np.array(found), np.array(expected), atol=1e-5)


def test_short_rows_beside_a_long_one_are_not_padded_to_it() -> None:
    arena = Arena([layer()], n_blocks=1200, block_size=BLOCK_SIZE)
    free = iter(range(1200))
    tables = [take(free, 10) for _ in range(15)] + [take(free, 900)]
    forward = RowGroup([TokenSpan(16 * len(table) - 1, 1, ids(table)) for table in tables], arena)
    work = work_list(
        forward.host_table, forward.starts_host, forward.stops_host, BLOCK_SIZE, min_saved_blocks=1
    )
    plan = plan_work(arena, forward.host_table, last_stops(forward), work, streams())
    passes = plan.reads_of(arena.layers[0])
    assert sum(part.keys.size for parts in passes for part in parts) == 2 * (15 * 10 + 900)


def test_tables_have_few_widths_and_little_padding() -> None:
    widths = [table_width(n_blocks) for n_blocks in range(1, 1025)]
    assert all(n <= width <= 1.125 * n for n, width in enumerate(widths, start=1))
    assert len(set(widths)) == 16 + 6 * 8
    assert widths == sorted(widths)


def take(free: Iterator[int], n_blocks: int) -> list[int]:
    return [next(free) for _ in range(n_blocks)]


def ids(table: list[int]) -> npt.NDArray[np.uint32]:
    return np.array(table, dtype=np.uint32)


def fill(arena: Arena) -> None:
    """So that every slot holds something that would show."""
    for layer in arena.layers:
        ids = mx.arange(arena.n_blocks)
        keys, values = layer.blocks(ids)
        keys, values = mx.random.normal(keys.shape), mx.random.normal(values.shape)
        mx.eval(keys, values)
        layer.put_blocks(0, keys, values)
