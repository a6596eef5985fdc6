"""The attention `cascade` for CPUs: decodes, with drafts too, read the arena's blocks in place, and
read blocks that several rows share once for all of them. Of blocks that are not stored as the model
computes K and V, see `products.py`.

Longer chunks are gathered and go through `tiles.py`: there the scores cost more than the reads. A
view leaves anything but causal attention to all keys to the model's own attention. The check at
load chooses `gather` (`Attention`) for a model that does not run with this one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from engine.mlx_backend.cpu.products import key_products, value_sums
from engine.mlx_backend.cpu.tiles import HIDDEN, PartialAttention, TilePlan
from engine.mlx_backend.kv.arena import Arena, LayerArena
from engine.mlx_backend.kv.shape import Heads
from engine.mlx_backend.model.attention import (
    Attention,
    BlockAttention,
    PrepareDecodeRows,
    softmax_exp,
)
from engine.mlx_backend.model.batching import group_by_length
from engine.mlx_backend.model.rows import (
    BlockTable,
    Counts,
    RowGroup,
    WorkList,
    common_prefixes,
    shared_prefixes,
    work_list,
)


@dataclass(frozen=True, slots=True)
class BlockReads:
    """Which blocks each group of queries attends to, in layers of equal heads.

    The four index arrays are `[groups, blocks, kv_heads]`: into the queries, into the blocks of K,
    into those of V, and into the scores. Heads are innermost so that memory is read in runs of
    whole blocks: 1.5 times as fast on two cores as head by head. `bias`, `[groups, blocks, 1,
    tokens, block_size]`, hides the keys after each of a group's tokens; None where every token sees
    all keys.
    """

    queries: mx.array
    keys: mx.array
    values: mx.array
    scores: mx.array
    bias: mx.array | None

    def halves(self) -> "tuple[BlockReads, BlockReads]":
        """The reads of the first and of the other half of each group's blocks."""
        n_groups, n_blocks, kv_heads = self.keys.shape
        middle = n_blocks // 2

        def part(own: slice) -> BlockReads:
            queries, keys, values = (of[:, own] for of in (self.queries, self.keys, self.values))
            scores = mx.arange(keys.size, dtype=mx.uint32).reshape(n_groups, -1, kv_heads)
            bias = None if self.bias is None else self.bias[:, own]
            return BlockReads(queries, keys, values, scores, bias)

        return part(slice(0, middle)), part(slice(middle, None))


def attend(queries: mx.array, layer: LayerArena, where: BlockReads) -> PartialAttention:
    """Attention of scaled `queries`, `[rows * kv_heads, n, key_dim]`, to each group's blocks. The n
    are the heads that read a KV head, with all tokens of a head side by side.

    The results are `[groups, 1, kv_heads, n, value_dim]`, and 1 in place of value_dim. Each layer
    of a decode runs this: with few rows an operation costs more than what it computes.
    """
    n, size = queries.shape[1], layer.block_size
    keys, values = layer.key_blocks(where.keys), layer.value_blocks(where.values)
    of_keys, of_values = layer.codecs
    if of_keys is None:
        columns = keys.rows(0).swapaxes(-1, -2)
        scores = mx.gather_mm(queries, columns, where.queries, keys.ids).astype(mx.float32)
    else:
        scores = key_products(queries, where.queries, of_keys, keys)
    if where.bias is not None:  # scores: [groups, blocks, kv_heads, n, block_size]
        tokens = where.bias.shape[3]
        if tokens == 1:
            scores = scores + where.bias
        else:
            by_token = scores.reshape(*scores.shape[:3], n // tokens, tokens, size)
            scores = (by_token + where.bias[:, :, :, None]).reshape(scores.shape)
    # One axis after the other: over both at once MLX takes twice as long.
    peak = scores.max(axis=1, keepdims=True).max(axis=4, keepdims=True)
    weights = softmax_exp(scores - peak)
    total = weights.sum(axis=1, keepdims=True).sum(axis=4, keepdims=True)
    if of_values is None:
        stored = values.rows(0)
        by_block = weights.astype(stored.dtype).reshape(-1, n, size)
        weighted = mx.gather_mm(by_block, stored, where.scores, values.ids)
        weighted = weighted.astype(mx.float32).sum(axis=1, keepdims=True)
    else:
        weighted = value_sums(weights, where.scores, of_values, values)
    return PartialAttention(peak, total, weighted)


def by_row(partial: PartialAttention, rows: int) -> PartialAttention:
    """What `attend` returns for the queries of all rows as one group, with each row as a group."""
    kv_heads = partial.peak.shape[2]

    def apart(array: mx.array) -> mx.array:
        return array.reshape(1, kv_heads, rows, -1, array.shape[-1]).transpose(2, 0, 1, 3, 4)

    return PartialAttention(apart(partial.peak), apart(partial.total), apart(partial.weighted))


class RowMerge:
    """Merges the partial results of each row, in whatever passes they were computed."""

    def __init__(self, rows: Counts, n_rows: int) -> None:
        """`rows[i]`: the row of partial result `i`, counted over all passes."""
        counts = np.bincount(rows, minlength=n_rows)
        nth = np.arange(counts.max())
        by_row = np.argsort(rows, kind="stable")
        found = (np.cumsum(counts) - counts)[:, None] + np.minimum(nth, counts[:, None] - 1)
        hidden = np.where(nth < counts[:, None], 0.0, HIDDEN).astype(np.float32)
        # Rows with fewer results than others repeat their last one, which is hidden.
        self._indices = mx.array(by_row[found])  # [rows, most]
        self._hidden = mx.array(hidden.reshape(*hidden.shape, 1, 1, 1, 1))

    def merge(self, partials: Sequence[PartialAttention]) -> PartialAttention:
        """Each row's attention over the keys of all its partial results."""
        peaks, totals, weighted = (
            mx.concatenate(arrays)[self._indices]  # [rows, most, 1, kv_heads, n, dim]
            for arrays in (
                [one.peak for one in partials],
                [one.total for one in partials],
                [one.weighted for one in partials],
            )
        )
        peaks = peaks + self._hidden
        peak = peaks.max(axis=1, keepdims=True)
        weights = softmax_exp(peaks - peak)
        total, weighted = (weights * totals).sum(axis=1), (weights * weighted).sum(axis=1)
        return PartialAttention(peak, total, weighted)


MIN_SAVED_BLOCKS = 384
"""A prefix is attended to once for all its rows where that saves this many block reads a layer.

Break-even on two cores: a pass and merging take thirty operations, while a block that several rows
read in one step comes from the cache after the first.
"""

PASS_BLOCKS = 64
"""Padding by this many blocks costs as much as one more pass over rows' private blocks.

Measured on two cores with 4 KV heads of 64: 32 and 128 lose where 64 gains.
"""

TWO_STREAM_NUMBERS = 2**21
"""From this many numbers of K and V on, two streams read half of the blocks each.

Measured on two cores of an AMD EPYC.
"""

SHORT_TOKENS = 16
"""Rows of up to this many tokens read blocks, as decodes do; longer ones are gathered and tiled.

At 24 and 32 tokens neither gains much on the other. Measured on two cores of an AMD EPYC.
"""


class CascadeAttention(Attention):
    """Decodes, with drafts too, read blocks without gathering them; long chunks go tile by tile.
    Rows that share a prefix must be neighbours, sorted by table.
    """

    name = "cascade"
    gathered_copies = 2  # the second is for scores: a short chunk's blocks hold them twice

    def __init__(self, min_saved_blocks: int = MIN_SAVED_BLOCKS) -> None:
        super().__init__()  # no padding: no row is read beyond its end
        self._min_saved_blocks = min_saved_blocks
        self._streams = mx.default_stream(mx.default_device()), mx.new_stream(mx.default_device())

    def prepare(self, group: RowGroup, window: int | None) -> BlockAttention | None:
        if window is not None:
            return None
        if group.length > SHORT_TOKENS:
            return TilePlan(group, self._streams)
        starts, stops, table = group.starts_host, group.stops_host, group.host_table
        work = work_list(table, starts, stops, group.arena.block_size, self._min_saved_blocks)
        return plan_work(group.arena, table, group.last_seen + 1, work, self._streams)

    def prepare_decode(
        self, rows: int, width: int, arena: Arena, window: int | None, sizes: tuple[int, ...]
    ) -> PrepareDecodeRows | None:
        if window is not None:
            return None
        lines, size = np.arange(rows, dtype=np.int32), arena.block_size
        kinds = {layer.shape.kv_heads for layer in arena.layers}
        # Constants of the trace: evaluated here, or each step would compute them again.
        indices = {kv_heads: _query_indices(lines, width, kv_heads) for kv_heads in kinds}
        positions = mx.arange(width * size).reshape(width, 1, 1, size)
        mx.eval(indices, positions)

        def prepare(group: RowGroup, work: Sequence[mx.array]) -> BlockAttention:
            bias = mx.where(positions <= group.starts[:, None, None, None, None], 0.0, HIDDEN)
            passes = [BlockPass(group.table, indices.__getitem__, bias)]
            return CascadePlan(group.arena, passes, self._streams)

        return prepare

    def shares_prefixes(self, table: BlockTable) -> bool:
        if len(table) == 1:
            return False
        ordered = table[np.lexsort(table.T[::-1])]
        most = np.full(len(table), table.shape[1], np.int32)
        return bool(shared_prefixes(common_prefixes(ordered, most), self._min_saved_blocks))


def _query_indices(rows: Counts, width: int, kv_heads: int) -> tuple[mx.array, mx.array]:
    """`BlockReads.queries` and `scores` of groups that are these rows, with `width` blocks each."""
    shape = len(rows), width, kv_heads
    heads = mx.arange(kv_heads, dtype=mx.uint32)
    queries = mx.array(rows.astype(np.uint32))[:, None] * kv_heads + heads
    scores = mx.arange(len(rows) * width * kv_heads, dtype=mx.uint32).reshape(shape)
    return mx.contiguous(mx.broadcast_to(queries[:, None], shape)), scores


class BlockPass(NamedTuple):
    """Groups of queries that attend to blocks in the same operations, padded to the longest.

    `table`: `[groups, blocks]`. `indices`: `BlockReads.queries` and `scores` by the number of KV
    heads. `bias`: see `BlockReads`.
    """

    table: mx.array
    indices: Callable[[int], tuple[mx.array, mx.array]]
    bias: mx.array | None


def plan_work(
    arena: Arena, table: BlockTable, stops: Counts, work: WorkList, streams: Sequence[mx.Stream]
) -> "CascadePlan":
    """The passes that carry a work list out. `stops`, `[rows, length]`: each token sees the
    positions below.

    Rows' private blocks take as few passes as padding allows. Each shared item is one more pass, of
    one group: the queries of all its rows.
    """
    size = arena.block_size
    passes, rows_of_results = list[BlockPass](), list[Counts]()

    def add(blocks: BlockTable, rows: Counts, n_keys: Counts) -> None:
        """`n_keys`, `[groups, tokens]`: how many keys of a group's blocks each token sees."""
        bias, width = None, blocks.shape[1]
        if (n_keys < width * size).any():
            keys = mx.arange(width * size).reshape(width, 1, 1, size)
            bias = mx.where(keys < mx.array(n_keys)[:, None, None, :, None], 0.0, HIDDEN)
        passes.append(BlockPass(mx.array(blocks), partial(_query_indices, rows, width), bias))

    own, shared = work[work["rows"] == 1], work[work["rows"] > 1]
    for group in group_by_length(own["blocks"].tolist(), PASS_BLOCKS):
        items = own[group]
        entries = items["block"][:, None] + np.arange(items["blocks"].max())
        blocks = table[items["row"][:, None], np.minimum(entries, table.shape[1] - 1)]
        blocks[entries >= (items["block"] + items["blocks"])[:, None]] = arena.blank
        add(blocks, items["row"], stops[items["row"]] - items["block"][:, None] * size)
        rows_of_results.append(items["row"])
    for item in shared:
        blocks = table[item["row"], item["block"] : item["block"] + item["blocks"]]
        add(blocks[None], np.zeros(1, np.int32), np.array([[item["keys"]]]))
        rows_of_results.append(np.arange(item["row"], item["row"] + item["rows"]))
    merge = RowMerge(np.concatenate(rows_of_results), len(own)) if len(passes) > 1 else None
    return CascadePlan(arena, passes, streams, shared, merge)


class CascadePlan(BlockAttention):
    """Passes of MLX operations, which all layers make: first those over rows' private blocks, then
    one for each of the `shared` items.
    """

    def __init__(
        self,
        arena: Arena,
        passes: Sequence[BlockPass],
        streams: Sequence[mx.Stream],
        shared: Sequence[np.void] | WorkList = (),
        merge: RowMerge | None = None,
    ) -> None:
        """`streams`: two, which share the blocks of large passes. `merge`: of the results of
        several passes.
        """
        self._arena = arena
        self._streams = streams
        self._passes = passes
        self._shared = shared
        self._n_private = len(passes) - len(shared)
        self._merge = merge
        self._reads = dict[Heads, list[Sequence[BlockReads]]]()

    def attend(
        self,
        queries: mx.array,
        layer: LayerArena,
        scale: float,
        window: int | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array | None:
        if window is not None or sinks is not None:
            return None
        rows, heads, length, key_dim = queries.shape
        kv_heads = layer.shape.kv_heads
        n = heads // kv_heads * length
        by_head = (queries * scale).reshape(rows * kv_heads, n, key_dim)
        reads = self.reads_of(layer)
        partials = [self._attend(by_head, layer, own) for own in reads[: self._n_private]]
        for item, shared in zip(self._shared, reads[self._n_private :], strict=True):
            first, last = item["row"] * kv_heads, (item["row"] + item["rows"]) * kv_heads
            of_rows = by_head[first:last].reshape(-1, kv_heads, n, key_dim).swapaxes(0, 1)
            together = of_rows.reshape(kv_heads, -1, key_dim)
            partials.append(by_row(self._attend(together, layer, shared), item["rows"]))
        whole = partials[0] if self._merge is None else self._merge.merge(partials)
        return whole.output().astype(queries.dtype).reshape(rows, heads, length, -1)

    def _attend(
        self, queries: mx.array, layer: LayerArena, parts: Sequence[BlockReads]
    ) -> PartialAttention:
        """`attend` to each part of a pass in a stream of its own."""
        partials = []
        for part, stream in zip(parts, self._streams, strict=False):
            with mx.stream(stream):
                partials.append(attend(queries, layer, part))
        return partials[0] if len(partials) == 1 else partials[0].merge(partials[1])

    def reads_of(self, layer: LayerArena) -> list[Sequence[BlockReads]]:
        """The reads of each pass in a layer, in one part or two. Layers of equal heads share
        them."""
        heads = layer.heads
        if heads not in self._reads:
            self._reads[heads] = []
            for table, indices, bias in self._passes:
                ids = self._arena.head_ids(table, heads.kv_heads)
                keys = mx.contiguous(ids.swapaxes(1, 2))
                queries, scores = indices(heads.kv_heads)
                values = self._arena.value_heads(keys, heads)
                whole = BlockReads(queries, keys, values, scores, bias)
                numbers = (
                    keys.size * layer.block_size * (layer.shape.key_dim + layer.shape.value_dim)
                )
                is_large = numbers >= TWO_STREAM_NUMBERS and table.shape[1] > 1
                self._reads[heads].append(whole.halves() if is_large else [whole])
        return self._reads[heads]
