"""Attention of prompt chunks in `cascade`, tile by tile (as in FlashAttention). The plain path,
`gather`, computes all scores of a chunk at once.

A tile is few enough queries and keys that its scores stay in a core's cache through all passes of
the softmax, and keys that causality hides from a whole tile are never touched. Its scores have the
queries innermost: sums and maxima over keys are then three times as fast on a CPU, and the product
of keys and queries is twice as fast as that of queries and keys.

MLX has one thread for a stream of operations; only products of matrices use more. So half of the KV
heads go through a second stream, where a chunk is worth that.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx

from engine.mlx_backend.exponential import softmax_exp
from engine.mlx_backend.kv.arena import LayerArena
from engine.mlx_backend.model.rows import RowGroup, table_width
from engine.mlx_backend.model.views import BlockAttention
from kvstore.pool import blocks_for

HIDDEN = -1e30
"""Added to scores of keys that are not seen. Finite: what is hidden whole must not make NaN of its
peak.
"""

TILE_KEYS = 2048
TILE_SCORES = 2**20
"""Scores of a tile over all heads that a stream takes: in float32 4 MiB. With fewer the operations
cost more than what they do. Measured in docs/adr/0003.
"""

KEYS_STEP = 128
"""Tiles read this many keys, or a multiple: MLX finds its buffers again by their size, and memory
that is touched for the first time costs a page fault for each 4 KiB.
"""

TWO_STREAM_SCORES = 2**15
"""From this many scores on, of one head over all keys, two streams share them.

Measured in docs/adr/0003.
"""


@dataclass(frozen=True, slots=True)
class KeySpan:
    """Keys [first, last) of a row. `bias`, `[keys, queries]`, hides what lies ahead of a query."""

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
    """The tiles of each row of a group; all layers share them. Some rows' KV heads are shared out
    among `streams`, all others are the first one's.
    """

    def __init__(self, group: RowGroup, streams: Sequence[mx.Stream]) -> None:
        starts, stops = group.starts_host.tolist(), group.stops_host.tolist()
        self._rows = list(zip(starts, stops, strict=True))
        self._group = group
        self._block_size = group.arena.block_size
        self._streams = streams
        self._tiles: dict[tuple[int, int], list[Tile]] = {}

    def attend(self, queries: mx.array, layer: LayerArena) -> mx.array:
        rows, heads, length, key_dim = queries.shape
        kv_heads = layer.shape.kv_heads
        by_head = queries.reshape(rows, kv_heads, heads // kv_heads, length, key_dim)
        outputs = [self._attend_row(of_row, row, layer) for row, of_row in enumerate(by_head)]
        return mx.stack(outputs).astype(queries.dtype).reshape(rows, heads, length, -1)

    def _attend_row(self, queries: mx.array, row: int, layer: LayerArena) -> mx.array:
        """No more keys than the row sees are gathered, however long others are."""
        n_blocks = self.n_blocks(row)
        ids = [of[row : row + 1, :, :n_blocks] for of in self._group.gather_ids(layer.heads)]
        outputs = []
        for heads, stream in self.head_slices(row, layer.shape.kv_heads):
            with mx.stream(stream):
                keys, values = layer.read([of[:, heads] for of in ids])
                own = queries[heads]
                tiles = self.tiles(row, own.shape[0] * own.shape[1])
                outputs.append(_attend_tiles(own, keys[0], values[0], tiles))
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)

    def head_slices(self, row: int, kv_heads: int) -> Iterator[tuple[slice, mx.Stream]]:
        """Which of the KV heads of a row each stream takes."""
        start, stop = self._rows[row]
        gains = (stop - start) * stop >= TWO_STREAM_SCORES
        streams = self._streams[: kv_heads if gains else 1]
        bounds = [index * kv_heads // len(streams) for index in range(len(streams) + 1)]
        for stream, first, last in zip(streams, bounds, bounds[1:], strict=False):
            yield slice(first, last), stream

    def n_blocks(self, row: int) -> int:
        """How many blocks of a row are gathered, some after its last; see `table_width`."""
        return table_width(blocks_for(self._rows[row][1], self._block_size))

    def tiles(self, row: int, heads: int) -> list[Tile]:
        """The tiles of a row for a stream that computes `heads` of its heads."""
        if (row, heads) not in self._tiles:
            n_queries = max(TILE_SCORES // (TILE_KEYS * heads), 1)
            n_keys = self.n_blocks(row) * self._block_size
            self._tiles[row, heads] = _tiles(*self._rows[row], n_queries, n_keys)
        return self._tiles[row, heads]


def _tiles(start: int, stop: int, n_queries: int, n_keys: int) -> list[Tile]:
    """Tiles of `n_queries` each, of a row that has `n_keys` to read."""
    tiles = []
    for first in range(start, stop, n_queries):
        last = min(first + n_queries, stop)
        tiles.append(Tile(first - start, last - start, _spans(first, last, n_keys)))
    return tiles


def _spans(first_query: int, last_query: int, n_keys: int) -> tuple[KeySpan, ...]:
    """The keys that the queries at positions [first_query, last_query) see, and a few more."""
    spans = []
    for first in range(0, last_query, TILE_KEYS):
        last = min(first + TILE_KEYS, -(-last_query // KEYS_STEP) * KEYS_STEP, n_keys)
        bias = _bias(first_query, last_query, first, last) if last > first_query + 1 else None
        spans.append(KeySpan(first, last, bias))
    return tuple(spans)


def _bias(first_query: int, last_query: int, first_key: int, last_key: int) -> mx.array:
    keys = mx.arange(first_key, last_key)[:, None]
    return mx.where(keys <= mx.arange(first_query, last_query), 0.0, HIDDEN)


@dataclass(frozen=True, slots=True)
class PartialTile:
    """A tile's attention over some of its keys: a `PartialAttention` with the queries last.

    All float32.

    `peak` and `total`: `[kv_heads, 1, queries]`; `weighted`: `[kv_heads, value_dim, queries]`.
    """

    peak: mx.array
    total: mx.array
    weighted: mx.array


def partial_tile(scores: mx.array, values: mx.array) -> PartialTile:
    """Over keys with `scores`, `[kv_heads, keys, queries]`, and `values`, `[kv_heads, keys,
    value_dim]`.
    """
    scores = scores.astype(mx.float32)  # half precision would lose the exponential's squarings
    peak = scores.max(axis=1, keepdims=True)
    weights = softmax_exp(scores - peak)
    total = weights.sum(axis=1, keepdims=True)
    return PartialTile(peak, total, values.swapaxes(1, 2) @ weights)


def merge(left: PartialTile, right: PartialTile) -> PartialTile:
    """Attention over the keys of both."""
    peak = mx.maximum(left.peak, right.peak)
    of_left, of_right = softmax_exp(left.peak - peak), softmax_exp(right.peak - peak)
    return PartialTile(
        peak,
        left.total * of_left + right.total * of_right,
        left.weighted * of_left + right.weighted * of_right,
    )


def _attend_tiles(
    queries: mx.array, keys: mx.array, values: mx.array, tiles: list[Tile]
) -> mx.array:
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
    own = own.swapaxes(1, 2)
    partial: PartialTile | None = None
    for span in tile.spans:
        scores = keys[:, span.first : span.last] @ own
        if span.bias is not None:
            scores = scores + mx.concatenate([span.bias] * group, axis=1)
        new = partial_tile(scores, values[:, span.first : span.last])
        partial = new if partial is None else merge(partial, new)
    assert partial is not None, "a tile sees at least its own first token"
    output = (partial.weighted / partial.total).swapaxes(1, 2)
    return output.reshape(kv_heads, group, n, -1)
