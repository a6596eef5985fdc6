"""The attention `cascade`, for CPUs: decodes, with drafts too, read the arena's blocks without
gathering them, and blocks that rows share only once for all of them.

The alternative is `gather` (`Attention`): the check at load takes it where a model does not run
with this one, and a view leaves to it what is not causal attention to all keys. Longer chunks are
gathered here too and go through `tiles.py`: the scores, not the reads, are what costs there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from engine.mlx_backend.cpu.tiles import HIDDEN, TilePlan
from engine.mlx_backend.exponential import softmax_exp
from engine.mlx_backend.kv.arena import Arena, Heads, LayerArena
from engine.mlx_backend.model.batching import group_by_length
from engine.mlx_backend.model.rows import BlockTable, RowGroup
from engine.mlx_backend.model.views import Attention, BlockAttention, DecodeAttention

Counts = npt.NDArray[np.int32]

ITEM = np.dtype([(name, np.int32) for name in ("row", "rows", "block", "blocks", "keys")])
"""One work item, five int32 side by side.

Rows [row, row + rows) attend to the first `keys` keys of entries [block, block + blocks) of the
table of any of them. All have `blocks` > 0 and `keys` > 0.
"""

WorkList = npt.NDArray[np.void]
"""`[items]` of `ITEM`: shared prefixes first, a prefix before those that go on from it; then each
row's own blocks, row by row."""


class SharedPrefix(NamedTuple):
    """Rows [first_row, last_row) share their blocks [first_block, last_block)."""

    first_row: int
    last_row: int
    first_block: int
    last_block: int


def work_list(
    table: BlockTable, starts: Counts, stops: Counts, block_size: int, min_saved_blocks: int
) -> WorkList:
    """The work of rows whose queries are at the positions from `starts` to below `stops`, `[rows]`,
    at least one each.

    `table` is sorted by row, so that rows which share a prefix are neighbours. The blocks of a
    row's queries are its own. A prefix is an item when that saves `min_saved_blocks` block reads.
    """
    prefixes: list[SharedPrefix] = []
    if len(stops) > 1:
        common = common_prefixes(table, starts // block_size)
        prefixes = shared_prefixes(common, min_saved_blocks)
    skipped = np.zeros(len(stops), dtype=np.int32)
    for prefix in prefixes:  # the deepest of a row comes last
        skipped[prefix.first_row : prefix.last_row] = prefix.last_block
    items = np.zeros(len(prefixes) + len(stops), dtype=ITEM)
    if prefixes:
        first_rows, last_rows, first_blocks, last_blocks = np.array(prefixes, dtype=np.int32).T
        shared = items[: len(prefixes)]
        shared["row"], shared["rows"] = first_rows, last_rows - first_rows
        shared["block"], shared["blocks"] = first_blocks, last_blocks - first_blocks
        shared["keys"] = shared["blocks"] * block_size
    own = items[len(prefixes) :]
    own["row"], own["rows"] = np.arange(len(stops)), 1
    own["block"], own["blocks"] = skipped, -(-stops // block_size) - skipped
    own["keys"] = stops - skipped * block_size
    return items


def common_prefixes(table: BlockTable, most: Counts) -> Counts:
    """How many blocks each row's table has in common with the next one's, `[rows - 1]`.

    `most`, `[rows]`: how many blocks of a row may be shared.
    """
    differs = table[1:] != table[:-1]
    common = np.where(differs.any(axis=1), differs.argmax(axis=1), table.shape[1])
    shared: Counts = np.minimum(common, np.minimum(most[1:], most[:-1])).astype(np.int32)
    return shared


def shared_prefixes(common: Counts, min_saved_blocks: int) -> list[SharedPrefix]:
    """Prefixes worth attending to once for all their rows, an outer one before those within it.

    `common`: `common_prefixes` of sorted tables. Where rows share a prefix and some of them a
    longer one, the longer begins where the shorter ends; one that saves too little is left out,
    and those within it begin where the next further out ends.
    """
    kept: list[SharedPrefix] = []
    covered = [0] * (len(common) + 1)
    for first, last, depth in reversed(_nested(common.tolist())):
        if (last - first - 1) * (depth - covered[first]) >= min_saved_blocks:
            kept.append(SharedPrefix(first, last, covered[first], depth))
            covered[first:last] = [depth] * (last - first)
    return kept


def _nested(common: list[int]) -> list[tuple[int, int, int]]:
    """First and last row of each maximal run of rows with a prefix in common, and its depth.

    An outer one comes after those within it. These are the LCP intervals of Abouelhoda, Kurtz and
    Ohlebusch 2004, "Replacing suffix trees with enhanced suffix arrays".
    """
    found: list[tuple[int, int, int]] = []
    open_intervals = [(0, 0)]  # first row and depth, the depths rising
    for row, depth in enumerate([*common, 0]):
        first = row
        while open_intervals[-1][1] > depth:
            first, ended = open_intervals.pop()
            found.append((first, row + 1, ended))
        if depth > open_intervals[-1][1]:
            open_intervals.append((first, depth))
    return found


@dataclass(frozen=True, slots=True)
class BlockReads:
    """Which blocks each group of queries attends to, for layers of the same heads.

    The four index arrays are `[groups, blocks, kv_heads]`: into the queries, into the blocks of K,
    into those of V, and into the score tiles. Heads are innermost so that memory is read in runs of
    whole blocks: 1.5 times as fast on two cores as head by head. `bias`, `[groups, blocks, 1, 1,
    length, block_size]`, hides what comes after the keys of each of a row's `length` tokens; None
    when nothing does.
    """

    queries: mx.array
    keys: mx.array
    values: mx.array
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


def reads(
    layer: LayerArena, arena: Arena, table: BlockTable, rows: Counts, keys: Counts
) -> BlockReads:
    """What rows read: for each line of `table` the queries of row `rows`.

    `keys`: how many keys of the line each of the row's tokens sees, `[lines, length]`; `[lines, 1]`
    where all see as many.
    """
    kv_heads = layer.heads.kv_heads
    heads = mx.arange(kv_heads, dtype=mx.uint32)
    blocks = mx.contiguous(arena.head_ids(mx.array(table), kv_heads).swapaxes(1, 2))
    queries = mx.array(rows.astype(np.uint32))[:, None] * kv_heads + heads
    shape = (*table.shape, kv_heads)
    return BlockReads(
        queries=mx.contiguous(mx.broadcast_to(queries[:, None], shape)),
        keys=blocks,
        values=arena.value_heads(blocks, layer.heads),
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
    are the heads that read a KV head, for each token in turn.
    """
    n, key_dim = queries.shape[2:]
    tiles = mx.gather_mm(
        queries.reshape(-1, n, key_dim),
        layer.key_blocks().swapaxes(-1, -2),
        where.queries,
        where.keys,
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
        where.values,
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
    scores = mx.gather_mm(by_head, keys, where.queries, where.keys).astype(mx.float32)
    if where.bias is not None:
        scores = scores + where.bias  # [rows, blocks, kv_heads, heads / kv_heads, block_size]
    peak = scores.max(axis=1, keepdims=True).max(axis=4, keepdims=True)
    weights = softmax_exp(scores - peak)
    total = weights.sum(axis=1, keepdims=True).sum(axis=4, keepdims=True)
    values = layer.value_blocks()
    by_tile = weights.astype(values.dtype).reshape(-1, heads // kv_heads, layer.block_size)
    weighted = mx.gather_mm(by_tile, values, where.tiles, where.values).astype(mx.float32)
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


MIN_SAVED_BLOCKS = 384
"""A prefix is attended to apart when that saves this many block reads in each layer.

Break-even on two cores: a pass and merging take thirty operations, while a block that several rows
read in one step comes from the cache after the first.
"""

PASS_BLOCKS = 64
"""Padding by this many blocks costs as much as one more pass over some rows' own blocks.

Measured on two cores with 4 KV heads of 64: 32 and 128 lose where 64 gains.
"""

SHORT_TOKENS = 16
"""Rows of up to this many tokens read blocks, as decodes do; longer ones are gathered and tiled.

At 24 and 32 tokens neither gains much on the other. Measured in docs/adr/0003.
"""


class CascadeAttention(Attention):
    """Decodes, with drafts too, read blocks without gathering them; long chunks go tile by tile.
    Rows that share a prefix must be neighbours, sorted by table.
    """

    name = "cascade"
    gathered_copies = 2  # the second is for scores: a short chunk's tiles hold them twice

    def __init__(self, min_saved_blocks: int = MIN_SAVED_BLOCKS) -> None:
        super().__init__()  # no padding: no row is read beyond its end
        self._min_saved_blocks = min_saved_blocks
        self._second_stream = mx.new_stream(mx.default_device())

    def prepare(self, group: RowGroup) -> BlockAttention:
        if group.length > SHORT_TOKENS:
            return TilePlan(group, (mx.default_stream(mx.default_device()), self._second_stream))
        starts, stops, table = group.starts_host, group.stops_host, group.host_table
        work = work_list(table, starts, stops, group.arena.block_size, self._min_saved_blocks)
        positions = starts[:, None] + np.arange(group.length, dtype=np.int32)
        stops_seen = np.minimum(positions + 1, stops[:, None])
        return CascadePlan(group.arena, table, stops_seen, work)

    def prepare_decode(self, rows: int, width: int, arena: Arena) -> DecodeAttention:
        return CascadeDecode(rows, width, arena)

    def shares_prefixes(self, table: BlockTable) -> bool:
        if len(table) == 1:
            return False
        ordered = table[np.lexsort(table.T[::-1])]
        most = np.full(len(table), table.shape[1], np.int32)
        return bool(shared_prefixes(common_prefixes(ordered, most), self._min_saved_blocks))


@dataclass(frozen=True, slots=True)
class LayerReads:
    """What a layer reads for each pass over rows' own blocks, and for each shared item."""

    passes: list[BlockReads]
    shared: list[BlockReads]


class CascadePlan(BlockAttention):
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
        self._reads = dict[Heads, LayerReads]()

    def attend(self, queries: mx.array, layer: LayerArena) -> mx.array:
        by_head = by_kv_head(queries, layer).flatten(2, 3)
        where = self.reads_of(layer)
        partials = [attend(by_head, layer, own) for own in where.passes]
        for item, shared in zip(self.shared, where.shared, strict=True):
            rows = by_head[item["row"] : item["row"] + item["rows"]]
            partials.append(attend_together(rows, layer, shared))
        output = self._merged(partials).output()
        return output.astype(queries.dtype).reshape(*queries.shape[:3], -1)

    def _merged(self, partials: list[PartialAttention]) -> PartialAttention:
        return partials[0] if self._index is None else merge_rows(partials, self._index)

    def reads_of(self, layer: LayerArena) -> LayerReads:
        """What a layer reads; layers of equal heads read the same."""
        if layer.heads not in self._reads:
            self._reads[layer.heads] = LayerReads(
                [self._own_reads(items, layer) for items in self._passes],
                [self._shared_reads(item, layer) for item in self.shared],
            )
        return self._reads[layer.heads]

    def _own_reads(self, items: WorkList, layer: LayerArena) -> BlockReads:
        """The items side by side, padded to the longest."""
        entries = items["block"][:, None] + np.arange(items["blocks"].max())
        within = np.minimum(entries, self._table.shape[1] - 1)
        table = self._table[items["row"][:, None], within]
        table[entries >= (items["block"] + items["blocks"])[:, None]] = self._arena.blank
        keys = self._stops[items["row"]] - items["block"][:, None] * self._arena.block_size
        return reads(layer, self._arena, table, items["row"], keys)

    def _shared_reads(self, item: np.void, layer: LayerArena) -> BlockReads:
        """One group, whose queries are those of the item's rows."""
        entries = slice(item["block"], item["block"] + item["blocks"])
        row, keys = np.zeros(1, np.int32), np.array([[item["keys"]]])
        return reads(layer, self._arena, self._table[item["row"], entries][None], row, keys)


class CascadeDecode(DecodeAttention):
    """The index arrays of a traced step that do not depend on its tables: constants of the trace,
    evaluated before it.
    """

    def __init__(self, rows: int, width: int, arena: Arena) -> None:
        self._constant = dict[int, tuple[mx.array, mx.array]]()
        for heads in {layer.shape.kv_heads for layer in arena.layers}:
            shape = (rows, width, heads)
            queries = np.arange(rows * heads, dtype=np.uint32).reshape(rows, 1, heads)
            tiles = np.arange(rows * width * heads, dtype=np.uint32).reshape(shape)
            whole = np.ascontiguousarray(np.broadcast_to(queries, shape))
            self._constant[heads] = mx.array(whole), mx.array(tiles)
        size = arena.block_size
        self._keys = mx.array(np.arange(width * size, dtype=np.int32).reshape(width, 1, 1, size))
        mx.eval(self._constant, self._keys)

    def of(self, group: RowGroup) -> BlockAttention:
        last = group.starts[:, None, None, None, None]
        return _TracedCascade(group, self._constant, mx.where(self._keys <= last, 0.0, HIDDEN))


class _TracedCascade(BlockAttention):
    """One token of each row, to all blocks of its table."""

    def __init__(
        self, group: RowGroup, constant: Mapping[int, tuple[mx.array, mx.array]], bias: mx.array
    ) -> None:
        self._group = group
        self._constant = constant
        self._bias = bias
        self._reads = dict[Heads, BlockReads]()

    def attend(self, queries: mx.array, layer: LayerArena) -> mx.array:
        heads = layer.heads
        if heads not in self._reads:
            by_query, tiles = self._constant[heads.kv_heads]
            group = self._group
            keys = group.arena.head_ids(group.table, heads.kv_heads).swapaxes(1, 2)
            keys = mx.contiguous(keys)
            values = group.arena.value_heads(keys, heads)
            self._reads[heads] = BlockReads(by_query, keys, values, tiles, self._bias)
        return decode_attention(queries, layer, self._reads[heads])


def by_kv_head(queries: mx.array, layer: LayerArena) -> mx.array:
    """`[rows, heads, length, key_dim]` to `[rows, kv_heads, group, length, key_dim]`."""
    rows, heads, length, key_dim = queries.shape
    kv_heads = layer.shape.kv_heads
    return queries.reshape(rows, kv_heads, heads // kv_heads, length, key_dim)
