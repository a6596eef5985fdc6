"""Attention that reads the arena's blocks where they lie, and merges parts by log-sum-exp.

Parts of one softmax merge exactly: each keeps its peak score, the sum of exp(score - peak) and the
values weighted so (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax").
"""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from engine.mlx_backend.attention.exponential import softmax_exp
from engine.mlx_backend.model.forward import Table
from kvstore.arena import Arena, LayerArena


@dataclass(frozen=True, slots=True)
class BlockReads:
    """Which blocks each group of queries attends to, for layers of one `kv_heads`.

    The three index arrays are `[groups, kv_heads, blocks]`: into the groups' queries, into the
    arena's blocks, and into the score tiles. `bias`, `[groups, 1, blocks, 1, block_size]`, keeps
    slots out that the group must not see; None when it sees all.
    """

    queries: mx.array
    blocks: mx.array
    tiles: mx.array
    bias: mx.array | None


@dataclass(frozen=True, slots=True)
class Part:
    """Part of a softmax. `peak` and `total`: `[groups, kv_heads, queries, 1]`; `weighted` has the
    value dimension last. All float32."""

    peak: mx.array
    total: mx.array
    weighted: mx.array

    def rows(self, first: int, last: int) -> "Part":
        return Part(self.peak[first:last], self.total[first:last], self.weighted[first:last])

    def output(self) -> mx.array:
        return self.weighted / self.total


def reads(arena: Arena, table: Table, kv_heads: int, bias: mx.array | None) -> BlockReads:
    """Index arrays for one group of queries per row of the table."""
    groups, blocks = table.shape
    queries = np.arange(groups * kv_heads, dtype=np.uint32).reshape(groups, kv_heads, 1)
    tiles = np.arange(groups * kv_heads * blocks, dtype=np.uint32)
    return BlockReads(
        queries=mx.array(np.repeat(queries, blocks, axis=2)),
        blocks=arena.head_ids(mx.array(table), kv_heads),
        tiles=mx.array(tiles.reshape(groups, kv_heads, blocks)),
        bias=bias,
    )


def attend(queries: mx.array, layer: LayerArena, where: BlockReads) -> Part:
    """Attention of scaled `queries`, `[groups, kv_heads, n, key_dim]`, to each group's blocks."""
    n, key_dim = queries.shape[2:]
    tiles = mx.gather_mm(
        queries.reshape(-1, n, key_dim),
        layer.key_blocks().swapaxes(-1, -2),
        where.queries,
        where.blocks,
    ).astype(mx.float32)  # [groups, kv_heads, blocks, n, block_size]
    if where.bias is not None:
        tiles = tiles + where.bias
    peak = tiles.max(axis=(2, 4), keepdims=True)
    weights = softmax_exp(tiles - peak)
    values = layer.value_blocks()
    weighted = mx.gather_mm(
        weights.astype(values.dtype).reshape(-1, n, layer.block_size),
        values,
        where.tiles,
        where.blocks,
    )
    return Part(
        peak=peak.squeeze(2),
        total=weights.sum(axis=(2, 4))[..., None],
        weighted=weighted.astype(mx.float32).sum(axis=2),
    )


def part_of(scores: mx.array, values: mx.array) -> Part:
    """The softmax's part over keys with `scores`, `[kv_heads, queries, keys]`, and `values`."""
    scores = scores.astype(mx.float32)  # half precision would lose the exponential's squarings
    peak = scores.max(axis=-1, keepdims=True)
    weights = softmax_exp(scores - peak)
    return Part(peak, weights.sum(axis=-1, keepdims=True), weights @ values)


def merge(left: Part, right: Part) -> Part:
    """The softmax over both parts' keys."""
    peak = mx.maximum(left.peak, right.peak)
    of_left, of_right = softmax_exp(left.peak - peak), softmax_exp(right.peak - peak)
    return Part(
        peak,
        left.total * of_left + right.total * of_right,
        left.weighted * of_left + right.weighted * of_right,
    )


def attend_together(queries: mx.array, layer: LayerArena, where: BlockReads) -> Part:
    """Attention of all rows' queries to one run of blocks; shapes as in `attend`."""
    rows, kv_heads, n, key_dim = queries.shape
    together = queries.transpose(1, 0, 2, 3).reshape(1, kv_heads, rows * n, key_dim)
    part = attend(together, layer, where)

    def by_row(array: mx.array) -> mx.array:
        return array.reshape(kv_heads, rows, n, -1).transpose(1, 0, 2, 3)

    return Part(by_row(part.peak), by_row(part.total), by_row(part.weighted))
