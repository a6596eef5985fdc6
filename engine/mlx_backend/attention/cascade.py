"""Decodes attend to blocks where they lie, and to blocks that rows share only once.

Prompt chunks are gathered and go tile by tile: there the scores, not the reads, are what costs.
"""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from engine.mlx_backend.attention.blocks import BlockReads, attend, attend_together, merge, reads
from engine.mlx_backend.attention.shared_prefixes import SharedPrefix, shared_prefixes
from engine.mlx_backend.attention.tiles import TiledView, TilePlan
from engine.mlx_backend.model.cache_views import CacheView
from engine.mlx_backend.model.forward import Forward, pad_tables
from kvstore.arena import Arena, LayerArena
from kvstore.types import BlockId

MIN_SAVED_BLOCKS = 256
"""A prefix is attended to apart when that saves this many block reads in each layer.

Break-even on two cores: merging takes a dozen operations more, while a block that several rows
read in one step comes from the cache after the first.
"""

_HIDDEN = -1e30  # finite: a block that is hidden whole must not make NaN of its peak


class CascadeAttention:
    """Implements `Attention`. Rows that share a prefix must be neighbours, sorted by table."""

    def __init__(self, min_saved_blocks: int = MIN_SAVED_BLOCKS) -> None:
        self._min_saved_blocks = min_saved_blocks

    def views(self, arena: Arena, forward: Forward) -> Sequence[CacheView]:
        if not arena.layers:
            return ()
        if forward.length > 1:
            tiles = TilePlan(forward)
            return [TiledView(layer, forward, tiles) for layer in arena.layers]
        plan = CascadePlan(arena, forward, self._min_saved_blocks)
        return [CascadeView(layer, forward, plan) for layer in arena.layers]


class CascadePlan:
    """What every layer's attention reads in one decode."""

    def __init__(self, arena: Arena, forward: Forward, min_saved_blocks: int) -> None:
        self._arena = arena
        size = arena.block_size
        tables = [
            [BlockId(block) for block in piece.blocks[: piece.stop // size].tolist()]
            for piece in forward.pieces
        ]
        self.prefixes = shared_prefixes(tables, min_saved_blocks)
        skipped = [0] * forward.rows
        for prefix in self.prefixes:
            for row in range(prefix.first_row, prefix.last_row):
                skipped[row] = prefix.n_blocks
        own = [
            piece.blocks[skip : -(-piece.stop // size)]
            for piece, skip in zip(forward.pieces, skipped, strict=True)
        ]
        self._own_table = pad_tables(own, arena.blank)
        stops = np.array([piece.stop for piece in forward.pieces]) - np.array(skipped) * size
        self._own_bias = self._bias(stops)
        self._tables = tables
        self._reads: dict[int, tuple[BlockReads, list[BlockReads]]] = {}

    def reads(self, kv_heads: int) -> tuple[BlockReads, list[BlockReads]]:
        """Every row's own blocks, and each shared prefix's."""
        if kv_heads not in self._reads:
            own = reads(self._arena, self._own_table, kv_heads, self._own_bias)
            shared = [self._prefix_reads(prefix, kv_heads) for prefix in self.prefixes]
            self._reads[kv_heads] = own, shared
        return self._reads[kv_heads]

    def _prefix_reads(self, prefix: SharedPrefix, kv_heads: int) -> BlockReads:
        table = np.array([self._tables[prefix.first_row][: prefix.n_blocks]], dtype=np.uint32)
        return reads(self._arena, table, kv_heads, bias=None)

    def _bias(self, stops: npt.NDArray[np.int64]) -> mx.array:
        rows, blocks = self._own_table.shape
        size = self._arena.block_size
        seen = np.arange(blocks * size) < stops[:, None]
        bias = np.where(seen, 0.0, _HIDDEN).astype(np.float32)
        return mx.array(bias.reshape(rows, 1, blocks, 1, size))


class CascadeView(CacheView):
    """A layer's view in a decode; computes attention when the model passes on what it was given."""

    def __init__(self, layer: LayerArena, forward: Forward, plan: CascadePlan) -> None:
        super().__init__(layer, forward)
        self._plan = plan

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: object
    ) -> mx.array | None:
        """As `CacheView.attend`. `queries`: `[rows, heads, 1, key_dim]`."""
        if not self.is_causal_attention(keys, values, mask):
            return None
        output = self._attend(self.by_kv_head(queries * scale).squeeze(3))
        return output.astype(queries.dtype).reshape(*queries.shape[:3], -1)

    def _attend(self, queries: mx.array) -> mx.array:
        own_reads, shared_reads = self._plan.reads(self.layer.shape.kv_heads)
        own = attend(queries, self.layer, own_reads)
        if not shared_reads:
            return own.output()
        outputs: list[mx.array] = []
        done = 0
        for prefix, where in zip(self._plan.prefixes, shared_reads, strict=True):
            first, last = prefix.first_row, prefix.last_row
            if done < first:
                outputs.append(own.rows(done, first).output())
            shared = attend_together(queries[first:last], self.layer, where)
            outputs.append(merge(own.rows(first, last), shared).output())
            done = last
        if done < queries.shape[0]:
            outputs.append(own.rows(done, queries.shape[0]).output())
        return mx.concatenate(outputs)
