"""`paged` attends as MLX does over gathered keys, in eager steps and in those of a steady batch."""

import random
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest

from engine.core.step import Sampling, SequenceId
from engine.mlx_backend.batch import BatchRow
from engine.mlx_backend.decode.batch import DecodeBatch, GroupTables, row_bucket
from engine.mlx_backend.gpu.paged import PagedAttention, as_it_is, smaller_units
from engine.mlx_backend.kv.arena import Arena
from engine.mlx_backend.kv.shape import LayerShape
from engine.mlx_backend.model.attention import SHORT_TOKENS, Attention, ListedWork
from engine.mlx_backend.model.rows import BlockTable, Counts, DecodeRows, RowGroup, TokenSpan
from engine.mlx_backend.model.sequences import SequenceTables
from engine.mlx_backend.sampling.edits import SamplingRow
from engine.values.request import SamplingParams
from engine.values.settings import KVFormat
from kvstore.ops import TablePatch
from kvstore.window import first_needed
from tests.devices import DEVICE, is_cpu, tolerance

BLOCK_SIZE = 8
HEADS, KV_HEADS = 4, 2
SCALE = 0.2
N_BLOCKS = 400
WINDOW = 20
SINKS = mx.array([0.5, -1.0, 2.0, 0.0])
TOLERANCES = {
    mx.float32: tolerance(1e-5),
    mx.float16: 2.0**-10,
    mx.bfloat16: 2.0**-7,
}
"""Of numbers about as large as 1, which the output rounds."""


AS_SERVED = smaller_units if is_cpu(DEVICE) else as_it_is


def paged() -> PagedAttention:
    return PagedAttention(Attention(), AS_SERVED, min_saved_blocks=1)


def filled(
    dtype: mx.Dtype = mx.float32, format: KVFormat = KVFormat.FULL, key_dim: int = 64
) -> Arena:
    """An arena of one layer whose every slot holds something that would show."""
    shape = LayerShape(KV_HEADS, key_dim, 64, dtype, dtype, format)
    arena = Arena([shape], N_BLOCKS, BLOCK_SIZE)
    [layer] = arena.layers
    blocks, slots = mx.arange(N_BLOCKS, dtype=mx.uint32), mx.arange(BLOCK_SIZE, dtype=mx.uint32)
    written = mx.repeat(blocks, BLOCK_SIZE), mx.tile(slots, [N_BLOCKS])
    keys, values = (
        mx.random.normal((N_BLOCKS, KV_HEADS, BLOCK_SIZE, dim), key=mx.random.key(dim)).astype(of)
        for dim, of in shape.vectors
    )
    layer.write(arena.slot_mapping(*written, layer.heads), keys, values)
    layer.query_heads = HEADS
    return arena


def expected(
    group: RowGroup, queries: mx.array, window: int | None, sinks: mx.array | None
) -> mx.array:
    """MLX's attention in float32 over gathered keys."""
    [layer] = group.arena.layers
    stored = layer.read(group.gather_ids(layer.heads))
    keys, values = (of[:, :, : group.n_keys].astype(mx.float32) for of in stored)
    return mx.fast.scaled_dot_product_attention(
        queries.astype(mx.float32),
        keys,
        values,
        scale=SCALE,
        mask=group.mask(window),
        sinks=sinks,
    )


def drawn_spans(draw: random.Random, window: int | None, most_tokens: int) -> list[TokenSpan]:
    """Rows of unlike lengths, of which some continue a prefix of others."""
    ids = iter(draw.sample(range(N_BLOCKS), N_BLOCKS))
    prefix = [next(ids) for _ in range(draw.randrange(1, 12))]
    spans = []
    for _ in range(draw.randrange(1, 7)):
        shared = prefix[: draw.randrange(len(prefix) + 1)] if draw.random() < 0.6 else []
        start = len(shared) * BLOCK_SIZE + draw.randrange(60)
        n_tokens = draw.randrange(1, most_tokens + 1)
        n_blocks = -(-(start + n_tokens) // BLOCK_SIZE)
        table = np.array([*shared, *(next(ids) for _ in range(n_blocks - len(shared)))], np.uint32)
        first = 0 if window is None else first_needed(start, window, BLOCK_SIZE)
        spans.append(TokenSpan(start, n_tokens, table[first:], first_block=first))
    return sorted(spans, key=lambda span: -len(span.blocks)) if draw.random() < 0.5 else spans


@pytest.mark.parametrize(
    ("dtype", "format", "key_dim"),
    [
        *((dtype, KVFormat.FULL, 64) for dtype in TOLERANCES),
        (mx.float32, KVFormat.FULL, 96),
        (mx.float32, KVFormat.BF16, 64),
        (mx.bfloat16, KVFormat.Q8, 64),
        (mx.float32, KVFormat.K8V4, 64),
    ],
)
def test_rows_of_a_step_attend_as_over_gathered_keys(
    dtype: mx.Dtype, format: KVFormat, key_dim: int
) -> None:
    """Decodes and drafts, with windows and sinks, and prefixes that some of them share."""
    arena, attention = filled(dtype, format, key_dim), paged()
    [layer] = arena.layers
    for seed in range(8):
        draw = random.Random(seed)
        window = draw.choice((None, WINDOW))
        sinks = draw.choice((None, SINKS.astype(dtype)))
        group = RowGroup(drawn_spans(draw, window, draw.choice((1, 1, 3, SHORT_TOKENS))), arena)
        shape = group.rows, HEADS, group.length, key_dim
        queries = mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)
        prepared = attention.prepare(group, window)
        assert prepared is not None
        found = prepared.attend(queries, layer, SCALE, window, sinks)
        assert found is not None
        assert found.dtype == dtype
        error = mx.abs(found - expected(group, queries, window, sinks)).max()
        assert float(error) < 4 * TOLERANCES[dtype], seed


def test_long_chunks_and_layers_that_it_does_not_cover_are_left_to_gather() -> None:
    arena = filled()
    span = TokenSpan(0, SHORT_TOKENS + 1, np.arange(4, dtype=np.uint32))
    assert paged().prepare(RowGroup([span], arena), None) is None
    odd = Arena([LayerShape(1, 576, 512, mx.float32, mx.float32)], 4, BLOCK_SIZE)
    odd.layers[0].query_heads = HEADS
    group = RowGroup([TokenSpan(0, 1, np.zeros(1, np.uint32))], odd)
    prepared = paged().prepare(group, None)
    assert prepared is not None
    assert prepared.attend(mx.zeros((1, HEADS, 1, 576)), odd.layers[0], SCALE) is None
    table = np.zeros((1, 4), np.uint32)
    assert paged().list_work(table, np.ones(1, np.int32), odd, None) is None


class Company:
    """Rows that decode a token each, and enter, leave, fork and grow at random."""

    def __init__(self, draw: random.Random) -> None:
        self.rows = list[BatchRow]()
        self._draw = draw
        self._free = draw.sample(range(N_BLOCKS), N_BLOCKS)
        self._n_entered = 0

    def change(self) -> None:
        """Let a row enter with a prompt, or a fork of another row, or one leave."""
        chance = self._draw.random()
        if len(self.rows) > 1 and chance < 0.3:
            self.rows.pop(self._draw.randrange(len(self.rows)))
        elif self.rows and chance < 0.7:
            self._fork(self._draw.choice(self.rows))
        elif len(self.rows) < 7:
            self._enter([], self._draw.randrange(90))

    def grow(self) -> None:
        """Give each row the block of its next token."""
        for row in self.rows:
            n_blocks = row.position // BLOCK_SIZE + 1
            if n_blocks > len(row.tables.ids(None)):
                self._patch(row.tables, n_blocks - 1, [self._free.pop()])

    def exchange(self) -> bool:
        """Give a row another block in place of its first one, as where equal ones are found."""
        row = self._draw.choice(self.rows)
        if row.position < BLOCK_SIZE:
            return False
        self._patch(row.tables, 0, [self._free.pop()])
        return True

    def _fork(self, row: BatchRow) -> None:
        n_shared = row.position // BLOCK_SIZE
        self._enter(row.tables.ids(None)[:n_shared].tolist(), row.position)

    def _enter(self, shared: Sequence[int], position: int) -> None:
        n_blocks = position // BLOCK_SIZE + 1
        tables = SequenceTables(1)
        own = [self._free.pop() for _ in range(n_blocks - len(shared))]
        self._patch(tables, 0, [*shared, *own])
        self._n_entered += 1
        sampling = SamplingRow(Sampling(SamplingParams(temperature=0.0), seed=0))
        row = BatchRow(SequenceId(self._n_entered), 0, tables, sampling)
        row.position = position
        self.rows.insert(self._draw.randrange(len(self.rows) + 1), row)

    def _patch(self, tables: SequenceTables, first: int, ids: Sequence[int]) -> None:
        for group in (None, 0):  # the window's blocks are the same
            tables.patch(TablePatch(group, first, tuple(ids)))


class CountingPaged(PagedAttention):
    """Counts its lists."""

    n_lists = 0

    def list_work(
        self, table: BlockTable, n_blocks: Counts, arena: Arena, window: int | None
    ) -> ListedWork | None:
        self.n_lists += 1
        return super().list_work(table, n_blocks, arena, window)


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 10))]
)
def test_a_steady_batch_attends_as_over_gathered_keys(seed: int) -> None:
    """Over steps in which rows come, go, fork, and grow past blocks, windows and tables. The list
    of work is older than the rows in most of them.
    """
    draw = random.Random(seed)
    arena = filled()
    [layer] = arena.layers
    attention, company = CountingPaged(Attention(), AS_SERVED, min_saved_blocks=1), Company(draw)
    groups = [GroupTables(arena, None, None), GroupTables(arena, 0, WINDOW)]
    batch: DecodeBatch | None = None
    n_batches = n_steps = n_exchanges = 0
    company.change()
    while n_steps < 90:
        if n_steps % 9 == 0:
            company.change()
        company.grow()
        n_exchanges += n_steps % 9 == 5 and company.exchange()
        rows = company.rows
        if batch is None or not batch.follows(rows):
            batch = DecodeBatch(rows, row_bucket(len(rows)), groups, None, attention)
            n_batches += 1
        shape = batch.size, HEADS, 1, 64
        queries = mx.random.normal(shape, key=mx.random.key(n_steps))
        for index, group in enumerate(groups):
            table, work = batch.tables[index], batch.work[index]
            firsts = None if group.window is None else batch.first_keys[index]
            traced = DecodeRows(arena, table, batch.positions, batch.positions, firsts)
            assert work is not None
            prepare = attention.prepare_decode(
                batch.size, table.shape[1], arena, group.window, work.sizes
            )
            assert prepare is not None
            found = prepare(traced, work.arrays).attend(queries, layer, SCALE, group.window)
            assert found is not None
            error = mx.abs(found - expected(traced, queries, group.window, None))
            assert float(error[: len(rows)].max()) < 4 * TOLERANCES[mx.float32], n_steps
        batch.move(batch.positions + batch.advance)
        n_steps += 1
    assert n_batches < n_steps / 2
    assert len(groups) * n_batches <= attention.n_lists <= len(groups) * n_batches + n_exchanges
