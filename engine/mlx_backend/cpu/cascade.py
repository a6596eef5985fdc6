"""The attention `cascade`, for CPUs: decodes, with drafts too, read the arena's blocks without
gathering them, and blocks that rows share only once for all of them.

The plain path beside it is `gather` (`attention/strategy.py`): the check at load takes it where a
model does not run with this one, and a view leaves to it what is not causal attention to all keys.
Longer chunks are gathered here too and go through `tiles.py`: the scores, not the reads, are what
costs there.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from engine.mlx_backend.cpu.blocks import (
    BlockReads,
    PartialAttention,
    attend,
    attend_together,
    merge_rows,
    partial_index,
    reads,
)
from engine.mlx_backend.cpu.tiles import TiledView, TilePlan
from engine.mlx_backend.cpu.work import (
    Counts,
    WorkList,
    common_prefixes,
    shared_prefixes,
    work_list,
)
from engine.mlx_backend.model.cache_views import CacheView
from engine.mlx_backend.model.forward import BlockTable, Forward
from engine.mlx_backend.model.forward_batch import group_by_length
from engine.mlx_backend.storage.arena import Arena, LayerArena

MIN_SAVED_BLOCKS = 384
"""A prefix is attended to apart when that saves this many block reads in each layer.

Break-even on two cores: a pass and merging take thirty operations, while a block that several rows
read in one step comes from the cache after the first.
"""

PASS_BLOCKS = 64
"""Padding by so many blocks costs as much as one more pass over some rows' own blocks.

Measured on two cores with 4 KV heads of 64: 32 and 128 lose where 64 gains.
"""

SHORT_TOKENS = 16
"""Rows of up to so many tokens read blocks, as decodes do; longer ones are gathered and tiled.

At 24 and 32 tokens neither gains much on the other. Measured in docs/adr/0003.
"""


class CascadeAttention:
    """Implements `Attention`. Rows that share a prefix must be neighbours, sorted by table."""

    name = "cascade"
    gathered_copies = 2  # the second is for scores: a short chunk's tiles hold them twice
    padding_keys = math.inf  # no row is read beyond its end

    def __init__(self, min_saved_blocks: int = MIN_SAVED_BLOCKS) -> None:
        self._min_saved_blocks = min_saved_blocks
        self._second_stream = mx.new_stream(mx.default_device())

    def shares(self, table: BlockTable) -> bool:
        """Whether rows with these tables, all but their last blocks, share prefixes that are worth
        attending to once. `table` is padded.
        """
        if len(table) == 1:
            return False
        ordered = table[np.lexsort(table.T[::-1])]
        most = np.full(len(table), table.shape[1], np.int32)
        return bool(shared_prefixes(common_prefixes(ordered, most), self._min_saved_blocks))

    def views(self, arena: Arena, forward: Forward) -> Sequence[CacheView]:
        if not arena.layers:
            return ()
        if forward.length > SHORT_TOKENS:
            streams = (mx.default_stream(mx.default_device()), self._second_stream)
            tiles = TilePlan(forward, arena.block_size, streams)
            return [TiledView(layer, forward, tiles) for layer in arena.layers]
        starts, stops = forward.starts_host, forward.stops_host
        work = work_list(forward.table, starts, stops, arena.block_size, self._min_saved_blocks)
        positions = starts[:, None] + np.arange(forward.length, dtype=np.int32)
        stops_seen = np.minimum(positions + 1, stops[:, None])
        plan = CascadePlan(arena, forward.table, stops_seen, work)
        return [CascadeView(layer, forward, plan) for layer in arena.layers]


@dataclass(frozen=True, slots=True)
class LayerReads:
    """What a layer reads for each pass over rows' own blocks, and for each shared item."""

    passes: list[BlockReads]
    shared: list[BlockReads]


class CascadePlan:
    """A work list as the passes of MLX operations that all layers make.

    Each shared item is a pass. Rows' own blocks take as few passes as padding allows: in one pass
    all rows are padded to the longest.
    """

    def __init__(self, arena: Arena, table: BlockTable, stops: Counts, work: WorkList) -> None:
        """`stops`, `[rows, length]`: each token sees the positions below."""
        self._arena = arena
        self._table = table
        self._stops = stops
        own = work[work["rows"] == 1]
        self.shared = work[work["rows"] > 1]
        self._passes = [
            own[group] for group in group_by_length(own["blocks"].tolist(), PASS_BLOCKS)
        ]
        rows = [items["row"] for items in self._passes]
        rows += [np.arange(item["row"], item["row"] + item["rows"]) for item in self.shared]
        self._index = partial_index(np.concatenate(rows), len(own)) if len(rows) > 1 else None
        self._reads: dict[int, LayerReads] = {}

    def attend(self, queries: mx.array, layer: LayerArena) -> mx.array:
        """The attention of scaled `queries`, `[rows, kv_heads, n, key_dim]`; value_dim last."""
        where = self.reads_of(layer.shape.kv_heads)
        partials = [attend(queries, layer, own) for own in where.passes]
        for item, shared in zip(self.shared, where.shared, strict=True):
            rows = queries[item["row"] : item["row"] + item["rows"]]
            partials.append(attend_together(rows, layer, shared))
        return self._merged(partials).output()

    def _merged(self, partials: list[PartialAttention]) -> PartialAttention:
        return partials[0] if self._index is None else merge_rows(partials, self._index)

    def reads_of(self, kv_heads: int) -> LayerReads:
        if kv_heads not in self._reads:
            self._reads[kv_heads] = LayerReads(
                [self._own_reads(items, kv_heads) for items in self._passes],
                [self._shared_reads(item, kv_heads) for item in self.shared],
            )
        return self._reads[kv_heads]

    def _own_reads(self, items: WorkList, kv_heads: int) -> BlockReads:
        """The items side by side, padded to the longest."""
        entries = items["block"][:, None] + np.arange(items["blocks"].max())
        within = np.minimum(entries, self._table.shape[1] - 1)
        table = self._table[items["row"][:, None], within]
        table[entries >= (items["block"] + items["blocks"])[:, None]] = self._arena.blank
        keys = self._stops[items["row"]] - items["block"][:, None] * self._arena.block_size
        return reads(self._arena, table, items["row"], keys, kv_heads)

    def _shared_reads(self, item: np.void, kv_heads: int) -> BlockReads:
        """One group, whose queries are those of the item's rows."""
        entries = slice(item["block"], item["block"] + item["blocks"])
        row, keys = np.zeros(1, np.int32), np.array([[item["keys"]]])
        return reads(self._arena, self._table[item["row"], entries][None], row, keys, kv_heads)


class CascadeView(CacheView):
    """A layer's view while rows are short; computes attention when the model passes on what it was
    given.
    """

    def __init__(self, layer: LayerArena, forward: Forward, plan: CascadePlan) -> None:
        super().__init__(layer, forward)
        self._plan = plan

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: mx.array | str | None,
        sinks: mx.array | None = None,
    ) -> mx.array | None:
        """As `KVView.attend`. `queries`: `[rows, heads, length, key_dim]`."""
        if not self.is_causal_attention(keys, values, mask, sinks):
            return None
        grouped = self.by_kv_head(queries * scale)
        output = self._plan.attend(grouped.flatten(2, 3), self.layer)
        return output.astype(queries.dtype).reshape(*queries.shape[:3], -1)
