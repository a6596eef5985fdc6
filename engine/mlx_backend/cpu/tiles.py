"""Attention of prompt chunks on CPUs, tile by tile, as in FlashAttention.

A tile has so few queries and keys that its scores stay in a core's cache through all passes of the
softmax, and keys that causality hides from a whole tile are never read. Its scores have the queries
innermost: sums and maxima over keys are then three times as fast on a CPU, and the product of keys
and queries is twice as fast as that of queries and keys. The plain path, `gather`, computes all
scores of a chunk at once.

MLX has one thread for a stream of operations, and only matrix products use more. So half of the KV
heads go through a second stream where a chunk is large enough.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import mlx.core as mx

from engine.mlx_backend.kv.arena import LayerArena
from engine.mlx_backend.model.attention import BlockAttention, softmax_exp
from engine.mlx_backend.model.rows import RowGroup, table_width
from kvstore.pool import blocks_for

HIDDEN = -1e30
"""Added to the scores of masked keys. Finite, so that the peak of a query whose keys are all masked
does not become NaN.
"""

TILE_KEYS = 2048
TILE_SCORES = 2**20
"""Scores of a tile over all heads that a stream computes: in float32 4 MiB. With fewer, the
operations' own cost outweighs what they compute. Measured on two cores of an
AMD EPYC.
"""

KEYS_STEP = 128
"""Tiles read a multiple of this many keys: MLX reuses its buffers by their size, and memory that is
touched for the first time costs a page fault for each 4 KiB.
"""

TWO_STREAM_SCORES = 2**15
"""From this many scores on, of one head over all keys, two streams share them.

Measured on two cores of an AMD EPYC.
"""


@dataclass(frozen=True, slots=True)
class PartialAttention:
    """Attention over some of the keys before it is normalized, to be merged with the other keys'.

    `peak`: the largest score of each query. `total`: the sum of exp(score - peak). `weighted`: the
    sum of the values weighted so. All float32, and `peak` and `total` broadcast over `weighted`.
    """

    peak: mx.array
    total: mx.array
    weighted: mx.array

    def merge(self, other: "PartialAttention") -> "PartialAttention":
        """Attention of the same queries over the keys of both."""
        peak = mx.maximum(self.peak, other.peak)
        own, others = softmax_exp(self.peak - peak), softmax_exp(other.peak - peak)
        return PartialAttention(
            peak,
            self.total * own + other.total * others,
            self.weighted * own + other.weighted * others,
        )

    def output(self) -> mx.array:
        """The normalized attention."""
        return self.weighted / self.total


@dataclass(frozen=True, slots=True)
class KeySpan:
    """Keys [first, last) of a row. `bias`, `[keys, queries]`, hides the keys after each query."""

    first: int
    last: int
    bias: mx.array | None


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries [first, last) of a row's chunk, and the keys that they see."""

    first: int
    last: int
    spans: tuple[KeySpan, ...]


class TilePlan(BlockAttention):
    """The tiles of each row of a group; all layers share them. The KV heads of a row with many
    scores are divided among `streams`; the first stream computes all other rows.
    """

    def __init__(self, group: RowGroup, streams: Sequence[mx.Stream]) -> None:
        starts, stops = group.starts_host.tolist(), group.stops_host.tolist()
        self._rows = list(zip(starts, stops, strict=True))
        self._group = group
        self._block_size = group.arena.block_size
        self._streams = streams
        self._tiles: dict[tuple[int, int], list[Tile]] = {}

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
        by_head = (queries * scale).reshape(rows, kv_heads, heads // kv_heads, length, key_dim)
        outputs = [self._attend_row(of_row, row, layer) for row, of_row in enumerate(by_head)]
        return mx.stack(outputs).astype(queries.dtype).reshape(rows, heads, length, -1)

    def _attend_row(self, queries: mx.array, row: int, layer: LayerArena) -> mx.array:
        """Attention of scaled queries, `[kv_heads, group, length, key_dim]`, to the keys that the
        row sees, however long other rows are. Padded queries get zeros.
        """
        kv_heads, group, length, _ = queries.shape
        (start, stop), n_blocks = self._rows[row], self.n_blocks(row)
        ids = [of[row : row + 1, :, :n_blocks] for of in self._group.gather_ids(layer.heads)]
        gains = (stop - start) * stop >= TWO_STREAM_SCORES
        streams = self._streams[: kv_heads if gains else 1]
        bounds = [index * kv_heads // len(streams) for index in range(len(streams) + 1)]
        outputs = []
        for stream, (first, last) in zip(streams, pairwise(bounds), strict=True):
            with mx.stream(stream):
                keys, values = layer.read([of[:, first:last] for of in ids])
                own = [
                    _attend_tile(queries[first:last], keys[0], values[0], tile)
                    for tile in self.tiles(row, (last - first) * group)
                ]
                if padding := length - (stop - start):
                    shape = (last - first, group, padding, layer.shape.value_dim)
                    own.append(mx.zeros(shape, queries.dtype))
                outputs.append(mx.concatenate(own, axis=2))
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)

    def n_blocks(self, row: int) -> int:
        """The number of blocks of a row that are gathered, a few more than it has; see
        `table_width`.
        """
        return table_width(blocks_for(self._rows[row][1], self._block_size))

    def tiles(self, row: int, heads: int) -> list[Tile]:
        """The tiles of a row for a stream that computes `heads` of its heads."""
        if (row, heads) not in self._tiles:
            start, stop = self._rows[row]
            n_queries = max(TILE_SCORES // (TILE_KEYS * heads), 1)
            n_keys = self.n_blocks(row) * self._block_size
            bounds = [*range(start, stop, n_queries), stop]
            self._tiles[row, heads] = [
                Tile(first - start, last - start, _key_spans(first, last, n_keys))
                for first, last in pairwise(bounds)
            ]
        return self._tiles[row, heads]


def _key_spans(first_query: int, last_query: int, n_keys: int) -> tuple[KeySpan, ...]:
    """The keys that queries at positions [first_query, last_query) see, and a few more, of the
    `n_keys` that are gathered.
    """
    spans = []
    for first in range(0, last_query, TILE_KEYS):
        last = min(first + TILE_KEYS, -(-last_query // KEYS_STEP) * KEYS_STEP, n_keys)
        bias = None
        if last > first_query + 1:
            keys, queries = mx.arange(first, last), mx.arange(first_query, last_query)
            bias = mx.where(keys[:, None] <= queries, 0.0, HIDDEN)
        spans.append(KeySpan(first, last, bias))
    return tuple(spans)


def _attend_tile(queries: mx.array, keys: mx.array, values: mx.array, tile: Tile) -> mx.array:
    """Attention of a tile's queries, `[kv_heads, group, last - first, value_dim]`.

    `queries`: scaled, of the whole chunk, `[kv_heads, group, length, key_dim]`. `keys` and
    `values`: `[kv_heads, keys, dim]`. The partial results have the queries last.
    """
    kv_heads, group, _, key_dim = queries.shape
    n = tile.last - tile.first
    own = queries[:, :, tile.first : tile.last].reshape(kv_heads, group * n, key_dim)
    own = own.swapaxes(1, 2)
    partial: PartialAttention | None = None
    for span in tile.spans:
        scores = keys[:, span.first : span.last] @ own  # [kv_heads, keys, queries]
        if span.bias is not None:
            scores = scores + mx.concatenate([span.bias] * group, axis=1)
        scores = scores.astype(mx.float32)
        peak = scores.max(axis=1, keepdims=True)
        weights = softmax_exp(scores - peak)
        total = weights.sum(axis=1, keepdims=True)
        weighted = values[:, span.first : span.last].swapaxes(1, 2) @ weights
        new = PartialAttention(peak, total, weighted)
        partial = new if partial is None else partial.merge(new)
    assert partial is not None, "a tile sees at least its own first token"
    return partial.output().swapaxes(1, 2).reshape(kv_heads, group, n, -1)
