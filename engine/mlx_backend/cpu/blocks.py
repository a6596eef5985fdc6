"""The operations of `cascade.py`: attention over blocks of the arena, without gathering them.

The plain path, `gather` (`attention/strategy.py`), copies a row's blocks side by side and computes
one softmax. This attends to blocks in several passes and merges the results.

Attention over parts of the keys merges exactly: each keeps its peak score, the sum of
exp(score - peak) and the values weighted so (Milakov and Gimelshein 2018, "Online normalizer
calculation for softmax").
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from engine.mlx_backend.cpu.work import Counts
from engine.mlx_backend.exponential import softmax_exp
from engine.mlx_backend.model.forward import BlockTable
from engine.mlx_backend.storage.arena import Arena, LayerArena

HIDDEN = -1e30  # finite: what is hidden whole must not make NaN of its peak


@dataclass(frozen=True, slots=True)
class BlockReads:
    """Which blocks each group of queries attends to, for layers of one `kv_heads`.

    The three index arrays are `[groups, blocks, kv_heads]`: into the queries, into the arena's
    blocks, and into the score tiles. Heads are innermost so that memory is read in runs of whole
    blocks: 1.5 times as fast on two cores as head by head. `bias`, `[groups, blocks, 1, 1, length,
    block_size]`, hides what lies behind the keys of each of a row's `length` tokens; None when
    nothing does.
    """

    queries: mx.array
    blocks: mx.array
    tiles: mx.array
    bias: mx.array | None


@dataclass(frozen=True, slots=True)
class PartialAttention:
    """Attention over some of the keys, before it is normalized, to be merged with other parts.

    `peak` (the largest score) and `total` (the sum of exp(score - peak)): `[groups, kv_heads,
    queries, 1]`. `weighted` (the values weighted so): the value dimension last. All float32.
    """

    peak: mx.array
    total: mx.array
    weighted: mx.array

    def output(self) -> mx.array:
        return self.weighted / self.total


@dataclass(frozen=True, slots=True)
class PartialIndex:
    """Which partial results belong to each row.

    `indices`, `[rows, most]`: into all partial results, one after another. `hidden`, `[rows, most,
    1, 1, 1]`: 0, or `HIDDEN` where a row has fewer of them than others.
    """

    indices: mx.array
    hidden: mx.array


def reads(arena: Arena, table: BlockTable, rows: Counts, keys: Counts, kv_heads: int) -> BlockReads:
    """For each line of `table` the queries of row `rows`, and how many `keys` in it each of the
    row's tokens sees, `[lines, length]`; `[lines, 1]` where all see as many.
    """
    heads = mx.arange(kv_heads, dtype=mx.uint32)
    queries = mx.array(rows.astype(np.uint32))[:, None] * kv_heads + heads
    shape = (*table.shape, kv_heads)
    return BlockReads(
        queries=mx.contiguous(mx.broadcast_to(queries[:, None], shape)),
        blocks=mx.contiguous(arena.head_ids(mx.array(table), kv_heads).swapaxes(1, 2)),
        tiles=mx.arange(table.size * kv_heads, dtype=mx.uint32).reshape(shape),
        bias=_bias(keys, table.shape[1], arena.block_size),
    )


def _bias(keys: Counts, n_blocks: int, block_size: int) -> mx.array | None:
    """See `BlockReads`; `keys`, `[groups, length]`, are what each token sees of `n_blocks`."""
    if (keys == n_blocks * block_size).all():
        return None
    positions = mx.arange(n_blocks * block_size).reshape(n_blocks, 1, 1, 1, block_size)
    seen = positions < mx.array(keys)[:, None, None, None, :, None]
    return mx.where(seen, 0.0, HIDDEN)


def attend(queries: mx.array, layer: LayerArena, where: BlockReads) -> PartialAttention:
    """Attention of scaled `queries`, `[rows, kv_heads, n, key_dim]`, to each group's blocks. The n
    are those of each head that reads a KV head, one token behind another.
    """
    n, key_dim = queries.shape[2:]
    tiles = mx.gather_mm(
        queries.reshape(-1, n, key_dim),
        layer.key_blocks().swapaxes(-1, -2),
        where.queries,
        where.blocks,
    ).astype(mx.float32)  # [groups, blocks, kv_heads, n, block_size]
    if where.bias is not None:
        by_token = tiles.reshape(*tiles.shape[:3], -1, *where.bias.shape[4:])
        tiles = (by_token + where.bias).reshape(tiles.shape)
    # One axis after the other: over both at once MLX takes twice as long.
    peak = tiles.max(axis=1, keepdims=True).max(axis=4, keepdims=True)
    weights = softmax_exp(tiles - peak)
    values = layer.value_blocks()
    weighted = mx.gather_mm(
        weights.astype(values.dtype).reshape(-1, n, layer.block_size),
        values,
        where.tiles,
        where.blocks,
    )
    return PartialAttention(
        peak=peak.squeeze(1),
        total=weights.sum(axis=1).sum(axis=3, keepdims=True),
        weighted=weighted.astype(mx.float32).sum(axis=1),
    )


def decode_attention(queries: mx.array, layer: LayerArena, where: BlockReads) -> mx.array:
    """Attention of one scaled query for each row and head, `[rows, heads, 1, key_dim]`, to all the
    row's blocks; the value dimension last. As `attend`, in as few operations as it takes: with
    few rows they cost more than what they compute. `where.bias`: `[rows, blocks, 1, 1,
    block_size]`.
    """
    rows, heads, _, key_dim = queries.shape
    kv_heads = layer.shape.kv_heads
    by_head = queries.reshape(rows * kv_heads, heads // kv_heads, key_dim)
    keys = layer.key_blocks().swapaxes(-1, -2)
    scores = mx.gather_mm(by_head, keys, where.queries, where.blocks).astype(mx.float32)
    if where.bias is not None:
        scores = scores + where.bias  # [rows, blocks, kv_heads, heads / kv_heads, block_size]
    peak = scores.max(axis=1, keepdims=True).max(axis=4, keepdims=True)
    weights = softmax_exp(scores - peak)
    total = weights.sum(axis=1, keepdims=True).sum(axis=4, keepdims=True)
    values = layer.value_blocks()
    by_tile = weights.astype(values.dtype).reshape(-1, heads // kv_heads, layer.block_size)
    weighted = mx.gather_mm(by_tile, values, where.tiles, where.blocks).astype(mx.float32)
    output = weighted.sum(axis=1, keepdims=True) / total
    return output.astype(queries.dtype).reshape(rows, heads, 1, -1)


def attend_together(queries: mx.array, layer: LayerArena, where: BlockReads) -> PartialAttention:
    """Attention of all rows' queries to blocks that they share; shapes as in `attend`."""
    rows, kv_heads, n, key_dim = queries.shape
    together = queries.swapaxes(0, 1).reshape(1, kv_heads, rows * n, key_dim)
    partial = attend(together, layer, where)

    def by_row(array: mx.array) -> mx.array:
        return array.reshape(kv_heads, rows, n, -1).swapaxes(0, 1)

    return PartialAttention(by_row(partial.peak), by_row(partial.total), by_row(partial.weighted))


def partial_index(rows: npt.NDArray[np.int32], n_rows: int) -> PartialIndex:
    """The index of `n_rows` rows; `rows[i]` is the row of partial result `i`."""
    counts = np.bincount(rows, minlength=n_rows)
    nth = np.arange(counts.max())
    by_row = np.argsort(rows, kind="stable")
    found = (np.cumsum(counts) - counts)[:, None] + np.minimum(nth, counts[:, None] - 1)
    hidden = np.where(nth < counts[:, None], 0.0, HIDDEN).astype(np.float32)
    return PartialIndex(mx.array(by_row[found]), mx.array(hidden.reshape(*hidden.shape, 1, 1, 1)))


def merge_rows(partials: Sequence[PartialAttention], index: PartialIndex) -> PartialAttention:
    """Each row's attention over the keys of all its partial results."""
    peaks, totals, weighted = (
        mx.concatenate(list(arrays))[index.indices]  # [rows, most, kv_heads, n, dim]
        for arrays in zip(*((one.peak, one.total, one.weighted) for one in partials), strict=True)
    )
    peaks = peaks + index.hidden
    peak = peaks.max(axis=1, keepdims=True)
    weights = softmax_exp(peaks - peak)
    total, weighted = (weights * totals).sum(axis=1), (weights * weighted).sum(axis=1)
    return PartialAttention(peak.squeeze(1), total, weighted)
