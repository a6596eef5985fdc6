"""Attention of prompt chunks on a CPU, tile by tile.

A tile is few enough queries and keys that its scores stay in a core's cache through all passes of
the softmax, and keys that causality hides from a whole tile are never touched.

MLX has one thread for a stream of operations; only products of matrices use more. So where
gathering and exponentials are most of the work, half of the KV heads go through a second stream.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx

from engine.mlx_backend.attention.blocks import HIDDEN, Part, merge, part_of
from engine.mlx_backend.model.cache_views import CacheView
from engine.mlx_backend.model.forward import Forward
from kvstore.arena import LayerArena
from kvstore.block_table import blocks_for

TILE_QUERIES = 32
TILE_KEYS = 1024
"""Scores of one tile: 8 heads of 32 x 1024 in float32 are 1 MiB. Measured in docs/adr/0003."""

TWO_STREAM_QUERIES = 128
TWO_STREAM_KEYS = 500
"""At most so many queries, at least so many keys. Measured in docs/adr/0003: with more queries the
products of matrices, which use all cores anyway, are the larger part.
"""


@dataclass(frozen=True, slots=True)
class Span:
    """Keys [first, last) of a row. `bias`, `[queries, keys]`, hides what lies ahead of a query."""

    first: int
    last: int
    bias: mx.array | None


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries [first, last) of a row's chunk, and the keys that they see."""

    first: int
    last: int
    spans: tuple[Span, ...]


class TilePlan:
    """The tiles of each row of a forward; all layers share them. Some rows' KV heads are shared out
    among `streams`, all others are the first one's.
    """

    def __init__(self, forward: Forward, streams: Sequence[mx.Stream]) -> None:
        starts, stops = forward.starts_host.tolist(), forward.stops_host.tolist()
        self.rows = [_tiles(start, stop - start) for start, stop in zip(starts, stops, strict=True)]
        self._by_row = [
            streams if _gains_by_streams(start, stop) else streams[:1]
            for start, stop in zip(starts, stops, strict=True)
        ]

    def parts(self, row: int, kv_heads: int) -> Iterator[tuple[slice, mx.Stream]]:
        """Which of the KV heads of a row each stream takes."""
        streams = self._by_row[row][:kv_heads]
        bounds = [index * kv_heads // len(streams) for index in range(len(streams) + 1)]
        for stream, first, last in zip(streams, bounds, bounds[1:], strict=False):
            yield slice(first, last), stream


def _gains_by_streams(start: int, stop: int) -> bool:
    return stop - start <= TWO_STREAM_QUERIES and stop >= TWO_STREAM_KEYS


def _tiles(start: int, n_queries: int) -> list[Tile]:
    tiles = []
    for first in range(0, n_queries, TILE_QUERIES):
        last = min(first + TILE_QUERIES, n_queries)
        tiles.append(Tile(first, last, _spans(start + first, start + last)))
    return tiles


def _spans(first_query: int, last_query: int) -> tuple[Span, ...]:
    """The keys that the queries at positions [first_query, last_query) see."""
    spans = []
    for first in range(0, last_query, TILE_KEYS):
        last = min(first + TILE_KEYS, last_query)
        bias = _bias(first_query, last_query, first, last) if last > first_query + 1 else None
        spans.append(Span(first, last, bias))
    return tuple(spans)


def _bias(first_query: int, last_query: int, first_key: int, last_key: int) -> mx.array:
    queries = mx.arange(first_query, last_query)[:, None]
    return mx.where(mx.arange(first_key, last_key) <= queries, 0.0, HIDDEN)


class TiledView(CacheView):
    """A layer's view while prompt chunks are computed."""

    def __init__(self, layer: LayerArena, forward: Forward, plan: TilePlan) -> None:
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
        outputs = [self._attend_row(grouped[row], row) for row in range(len(self._plan.rows))]
        return mx.stack(outputs).astype(queries.dtype).reshape(*queries.shape[:3], -1)

    def _attend_row(self, queries: mx.array, row: int) -> mx.array:
        """No more keys than the row sees are gathered, however long others are. What was fetched
        for all rows together is never computed.
        """
        kv_heads = self.layer.shape.kv_heads
        n_blocks = blocks_for(int(self.forward.stops_host[row]), self.layer.block_size)
        blocks = self.forward.heads(kv_heads)[row : row + 1, :, :n_blocks]
        outputs = []
        for heads, stream in self._plan.parts(row, kv_heads):
            with mx.stream(stream):
                keys, values = self.layer.read(blocks[:, heads])
                tiles = self._plan.rows[row]
                outputs.append(_attend_row(queries[heads], keys[0], values[0], tiles))
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)


def _attend_row(queries: mx.array, keys: mx.array, values: mx.array, tiles: list[Tile]) -> mx.array:
    """`queries`: scaled, `[kv_heads, group, length, key_dim]`; padded ones get zeros."""
    length = queries.shape[2]
    outputs = [_attend_tile(queries, keys, values, tile) for tile in tiles]
    padding = length - tiles[-1].last
    if padding:
        outputs.append(mx.zeros((*queries.shape[:2], padding, values.shape[-1]), queries.dtype))
    return mx.concatenate(outputs, axis=2)


def _attend_tile(queries: mx.array, keys: mx.array, values: mx.array, tile: Tile) -> mx.array:
    """`[kv_heads, group, last - first, value_dim]`."""
    kv_heads, group, _, key_dim = queries.shape
    n = tile.last - tile.first
    own = queries[:, :, tile.first : tile.last].reshape(kv_heads, group * n, key_dim)
    part: Part | None = None
    for span in tile.spans:
        scores = own @ keys[:, span.first : span.last].swapaxes(-1, -2)
        if span.bias is not None:
            scores = scores + mx.concatenate([span.bias] * group)
        new = part_of(scores, values[:, span.first : span.last])
        part = new if part is None else merge(part, new)
    assert part is not None, "a tile sees at least its own first token"
    return part.output().reshape(kv_heads, group, n, -1)
