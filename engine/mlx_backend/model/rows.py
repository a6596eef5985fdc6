"""The rows of a forward: which tokens they are, the index arrays that all layers share, and the
blocks that rows have in common, as a list of attention's work.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from engine.mlx_backend.kv.arena import Arena
from engine.mlx_backend.kv.shape import Heads, SlotMapping
from engine.mlx_backend.model.sequences import SequenceImages, SequenceTables
from kvstore.pool import blocks_for
from kvstore.types import BlockId

BlockTable = npt.NDArray[np.uint32]
"""Block ids of several rows, `[rows, blocks]`, padded with the arena's blank block."""


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Consecutive tokens of one sequence to compute, positions [start, start + n_tokens).

    `blocks[i]` holds the positions of the sequence's block `first_block + i`; the blocks cover
    every position up to the last token's. `sequence`: None in measurements of attention alone.

    `index`: the number of the span, or of the span that this is a part of, among the step's.
    `first_token`: the index of its first token id among the step's. `n_read`: the number of its
    last tokens whose logits are read.
    """

    start: int
    n_tokens: int
    blocks: npt.NDArray[np.uint32]
    first_block: int = 0
    sequence: SequenceTables | None = None
    index: int = 0
    first_token: int = 0
    n_read: int = 0

    @classmethod
    def of(
        cls,
        sequence: SequenceTables,
        start: int,
        n_tokens: int,
        index: int,
        first_token: int,
        n_read: int,
    ) -> "TokenSpan":
        """Tokens of a sequence, with all of its blocks."""
        blocks = sequence.ids(None)
        return cls(start, n_tokens, blocks, 0, sequence, index, first_token, n_read)

    @property
    def adapter(self) -> str:
        """The name of the adapter that computes the tokens; "" for none."""
        return "" if self.sequence is None else self.sequence.adapter

    @property
    def images(self) -> SequenceImages | None:
        """The images of its sequence; None where it has none."""
        return None if self.sequence is None else self.sequence.images

    @property
    def rotary_delta(self) -> int:
        """The rotary position of its first token, less its position. It is that of all tokens where
        they are text.
        """
        return 0 if self.sequence is None else self.sequence.rotary_delta(self.start)

    def slots(self, group: int) -> npt.NDArray[np.uint32]:
        """The table of its sequence in one of the store's other groups: a view."""
        assert self.sequence is not None, "a span of no sequence has no other tables"
        return self.sequence.ids(group)

    @property
    def stop(self) -> int:
        """The position after the last token."""
        return self.start + self.n_tokens

    @property
    def wholes(self) -> Sequence[tuple[int, int]]:
        """First and last positions, exclusive, of images whose tokens see each other. Raises
        ValueError where one is cut.
        """
        return () if self.images is None else self.images.wholes_in(self.start, self.stop)

    def split(self, n_tokens: int) -> Iterator[tuple[int, "TokenSpan"]]:
        """Parts of at most `n_tokens` tokens, or of an image that is computed whole, with the
        offset in the span of each. All logits are read.
        """
        ahead, wholes = 0, self.wholes
        while ahead < self.n_tokens:
            stop = min(self.start + ahead + n_tokens, self.stop)
            for first, last in wholes:
                if first < stop < last:
                    stop = last if first <= self.start + ahead else first
            n = stop - self.start - ahead
            yield ahead, self._part(ahead, n, n)
            ahead += n

    def unread_part(self) -> "TokenSpan":
        """The tokens before those whose logits are read."""
        return self._part(0, self.n_tokens - self.n_read, 0)

    def read_part(self) -> "TokenSpan":
        """The tokens whose logits are read."""
        return self._part(self.n_tokens - self.n_read, self.n_read, self.n_read)

    def _part(self, ahead: int, n_tokens: int, n_read: int) -> "TokenSpan":
        start, first_token = self.start + ahead, self.first_token + ahead
        return replace(self, start=start, n_tokens=n_tokens, first_token=first_token, n_read=n_read)


Wholes: TypeAlias = Sequence[Sequence[tuple[int, int]]]
"""Of each row, first and last positions, exclusive, of tokens that see each other."""


def wholes(spans: Sequence[TokenSpan]) -> Wholes:
    """The images of these spans whose tokens see each other; empty where there is none."""
    found = [span.wholes for span in spans]
    return found if any(found) else ()


class RowGroup:
    """Rows of one length over one arena, padded on the right, and what their attention reads.

    `starts`, `[rows]`: the position of each row's first token. `table`: the rows' blocks, from the
    one with their first key on, which is at position `first_keys`, `[rows]`, or 0 where that is
    None. `written`: the block and the slot of each token, both `[rows * length]`, row by row;
    padding is written to the arena's scratch block, and no real token's mask admits it. `begun`:
    the blocks and slots that are zeroed before that; see `ArenaForward.cleared`. A lone row,
    `is_lone`, has `n_keys` keys and no padding after them.

    `starts` and `rotary_starts`, `[rows]`, on the device: the position of each row's first token,
    and its rotary position, which is another after images in some models.

    On the host, int32: `starts_host`, `stops_host` (the position after each row's last token) and
    `first_positions` (of its first key), all `[rows]`; `positions`, `rotary_positions` and
    `last_seen`, `[rows, length]`, the last position that each token sees. Padding sees what its
    row's last token does, because a softmax over no keys is NaN.
    """

    begun: list[tuple[BlockId, int]]
    looks_ahead = False  # whether any token sees later ones, of its image

    def __init__(self, spans: Sequence[TokenSpan], arena: Arena, wholes: Wholes = ()) -> None:
        """Raises ValueError when a span's blocks do not cover its positions."""
        size = arena.block_size
        self.host_table = pad_tables([_needed_blocks(span, size) for span in spans], arena.blank)
        bounds = [(span.start, span.stop, span.first_block * size) for span in spans]
        self.starts_host, self.stops_host, self.first_positions = np.array(bounds, np.int32).T
        length = max(span.n_tokens for span in spans)
        self.positions = self.starts_host[:, None] + np.arange(length, dtype=np.int32)
        self.last_seen = np.minimum(self.positions, self.stops_host[:, None] - 1)
        self._own = self.last_seen  # padding has the position of its row's last token
        if wholes:
            self.looks_ahead, self.last_seen = True, self.last_seen.copy()
            for seen, span, runs in zip(self.last_seen, spans, wholes, strict=True):
                for first, last in runs:
                    seen[first - span.start : last - span.start] = last - 1
        first_keys = mx.array(self.first_positions) if self.first_positions.any() else None
        table, starts = mx.array(self.host_table), mx.array(self.starts_host)
        deltas = np.array([span.rotary_delta for span in spans], np.int32)
        self.rotary_positions = self.positions + deltas[:, None]
        rotary = mx.array(self.rotary_positions[:, 0]) if deltas.any() else starts
        self._share(arena, table, starts, rotary, first_keys, length)
        self.is_lone = len(spans) == 1
        if self.is_lone:
            self.n_keys = spans[0].stop - spans[0].first_block * size
        entries, slots = np.divmod(self.positions - self.first_positions[:, None], size)
        padding = self.positions >= self.stops_host[:, None]
        entries[padding] = 0
        blocks = self.host_table[np.arange(self.rows)[:, None], entries]
        blocks[padding] = arena.scratch
        self.written = mx.array(blocks.ravel()), mx.array(slots.ravel())
        self.begun = [slot for span in spans for slot in _begun_slots(span, size)]

    def _share(
        self,
        arena: Arena,
        table: mx.array,
        starts: mx.array,
        rotary_starts: mx.array,
        first_keys: mx.array | None,
        length: int,
    ) -> None:
        """Set what a group of spans and a traced one have in common."""
        self.arena = arena
        self.table = table
        self.starts = starts
        self.rotary_starts = rotary_starts
        self.first_keys = first_keys
        self.length = length
        self.rows, width = table.shape
        self.n_keys = width * arena.block_size
        self._gather_ids = dict[Heads, tuple[mx.array, mx.array]]()
        self._masks = dict[int | None, mx.array]()

    def gather_ids(self, heads: Heads) -> tuple[mx.array, mx.array]:
        """The index arrays with which a layer of these heads gathers K and V; see
        `Arena.gather_ids`.
        """
        if heads not in self._gather_ids:
            self._gather_ids[heads] = self.arena.gather_ids(self.table, heads)
        return self._gather_ids[heads]

    def mask(self, window: int | None = None) -> mx.array:
        """Which keys each token sees, boolean `[rows, 1, length, keys]`.

        Keys are those of the whole table, or for a lone row of exactly its positions. With a window
        a token sees itself and the `window - 1` tokens before it.
        """
        if window not in self._masks:
            queries = self.last_seen_array()[:, None, :, None]
            keys = mx.arange(self.n_keys)
            if self.first_keys is not None:
                keys = keys + self.first_keys[:, None, None, None]
            mask = keys <= queries
            if window is not None:
                own = mx.array(self._own)[:, None, :, None] if self.looks_ahead else queries
                mask = mask & (keys > own - window)
            self._masks[window] = mask
        return self._masks[window]

    def last_seen_array(self) -> mx.array:
        """`last_seen` on the device."""
        return mx.array(self.last_seen)


class DecodeRows(RowGroup):
    """One token of each row, whose positions and block table are arrays on the device, for tracing
    a decode step. The step clears the blocks that rows begin before it is replayed.
    """

    def __init__(
        self,
        arena: Arena,
        table: mx.array,
        positions: mx.array,
        rotary_positions: mx.array,
        first_keys: mx.array | None,
    ) -> None:
        self._share(arena, table, positions, rotary_positions, first_keys, 1)
        self.is_lone = False  # a lone row's table has padding, too
        held = positions if first_keys is None else positions - first_keys
        entries = (held // arena.block_size)[:, None]
        blocks = mx.take_along_axis(table, entries, axis=1)[:, 0]
        self.written = blocks, (held % arena.block_size).astype(mx.uint32)
        self.begun = []

    def last_seen_array(self) -> mx.array:
        return self.starts[:, None]


class ArenaForward:
    """What the views of one arena know of a forward: its row groups, one after another.

    `offset`: the rotary position of each row's first token, which is what a model reads from its
    cache; `offset_after`: that after its last token, padding included.

    Where `stands_in`, each token is a row of the model's arrays if there are several groups, and
    attention is computed for each group by itself: the K, V and mask that the model is given only
    stand in for those of the groups. Otherwise there is one group, whose keys and mask the model
    has.
    """

    def __init__(
        self,
        groups: Sequence[RowGroup],
        stands_in: bool,
        masks_by_head: bool = False,
        int_offsets: bool = False,
    ) -> None:
        """`masks_by_head` and `int_offsets`: see `Batching`. Raises ValueError for several groups
        of which each has keys of its own.
        """
        if len(groups) > 1 and not stands_in:
            raise ValueError("its caches take no rows of unlike length in one forward")
        self.groups = groups
        self.arena = groups[0].arena
        self.stands_in = stands_in
        self.looks_ahead = any(group.looks_ahead for group in groups)
        self._masks_by_head = masks_by_head
        [self.rows, self.length, self.is_lone] = groups[0].rows, groups[0].length, groups[0].is_lone
        self.offset: mx.array | int = groups[0].rotary_starts
        self._written = groups[0].written
        if int_offsets:
            [self.offset] = groups[0].rotary_positions[:, 0].tolist()
        if len(groups) > 1:
            counts = [group.rows * group.length for group in groups]
            self.rows, self.length, self.is_lone = sum(counts), 1, False
            self.bounds = np.cumsum([0, *counts]).tolist()  # of each group among the tokens
            positions = [group.rotary_positions.ravel() for group in groups]
            self.offset = mx.array(np.concatenate(positions))
            blocks, slots = zip(*(group.written for group in groups), strict=True)
            self._written = mx.concatenate(list(blocks)), mx.concatenate(list(slots))
        self.offset_after: mx.array | int = self.offset + self.length
        self._begun = [slot for group in groups for slot in group.begun]
        self._slot_mappings = dict[Heads, SlotMapping]()
        self._cleared = dict[Heads, SlotMapping]()
        self._masks = dict[int | None, mx.array]()

    def mask(self, window: int | None = None) -> mx.array:
        """Which keys each token sees, or what stands in for that, `[rows, 1, length, length]`."""
        if window not in self._masks:
            if self.stands_in:
                mask = mx.ones((self.rows, 1, self.length, self.length), mx.bool_)
            else:
                mask = self.groups[0].mask(window)
            self._masks[window] = mask[:, :, None] if self._masks_by_head else mask
        return self._masks[window]

    def window_of(self, mask: mx.array | str | None) -> int | None:
        """The window of a mask that stood in. Raises ValueError for another mask."""
        if mask is None or (isinstance(mask, str) and mask == "causal"):
            return None
        for window, own in self._masks.items():
            if own is mask:
                return window
        raise ValueError("the model makes masks of its own")

    def slot_mapping(self, heads: Heads) -> SlotMapping:
        """The slots that K and V are written to in a layer of these heads; see
        `Arena.slot_mapping`.
        """
        if heads not in self._slot_mappings:
            self._slot_mappings[heads] = self.arena.slot_mapping(*self._written, heads)
        return self._slot_mappings[heads]

    def cleared(self, heads: Heads) -> SlotMapping | None:
        """The slots to zero in a layer before K and V are written: those after each row's last
        token.

        None when this forward begins no block that it does not fill. After the last token of any
        other block there are zeros since it was begun or copied, and what rejected drafts have
        left. These are numbers: otherwise the tokens computed with them would be NaN.
        """
        if not self._begun:
            return None
        if heads not in self._cleared:
            blocks, slots = (
                mx.array(column, mx.uint32) for column in zip(*self._begun, strict=True)
            )
            self._cleared[heads] = self.arena.slot_mapping(blocks, slots, heads)
        return self._cleared[heads]


def _needed_blocks(span: TokenSpan, block_size: int) -> npt.NDArray[np.uint32]:
    needed = blocks_for(span.stop, block_size) - span.first_block
    if len(span.blocks) < needed or span.first_block * block_size > span.start:
        raise ValueError(
            f"{len(span.blocks)} blocks from the {span.first_block}-th on do not cover the "
            f"positions {span.start} to {span.stop}"
        )
    return span.blocks[:needed]


def _begun_slots(span: TokenSpan, block_size: int) -> list[tuple[BlockId, int]]:
    """Block and slot of what lies after a span, if it begins the block that it ends in."""
    filled = span.stop % block_size
    if filled == 0 or filled > span.n_tokens:
        return []
    block = BlockId(int(span.blocks[span.stop // block_size - span.first_block]))
    return [(block, slot) for slot in range(filled, block_size)]


def table_width(n_blocks: int) -> int:
    """At least `n_blocks`, at most an eighth more, and one of eight widths in each octave.

    The arrays gathered by a table then take few sizes while rows grow, so that MLX reuses its
    buffers and a GPU its graphs. Attention that reads block by block reads no padding.
    """
    step = 1 << max(0, (n_blocks - 1).bit_length() - 4)
    return -(-n_blocks // step) * step


def pad_tables(
    tables: Sequence[npt.NDArray[np.uint32]], blank: BlockId, width: int = 0
) -> BlockTable:
    """Tables of different lengths as one array of `width` blocks; 0: a `table_width`."""
    width = width or table_width(max(len(table) for table in tables))
    padded = np.full((len(tables), width), blank, dtype=np.uint32)
    for row, table in enumerate(tables):
        padded[row, : len(table)] = table
    return padded


Counts = npt.NDArray[np.int32]
"""Rows, or numbers of blocks or keys of rows."""

ITEM = np.dtype([(name, np.int32) for name in ("row", "rows", "block", "blocks", "keys")])
"""A work item, five int32: rows [row, row + rows) attend to the first `keys` keys of entries
[block, block + blocks) of their tables, which are the same in all of these rows. `blocks` and
`keys` are positive.
"""

WorkList = npt.NDArray[np.void]
"""`[items]` of `ITEM`: shared prefixes first, each before those that continue it; then the private
blocks of each row, row by row."""


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

    `table` is sorted by row, so that rows that share a prefix are neighbours. The blocks of a
    row's queries are always private. A prefix is an item where that saves at least
    `min_saved_blocks` block reads.
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
    """The number of blocks that each row's table shares with the next row's, `[rows - 1]`.

    `most`, `[rows]`: the number of blocks of a row that may be shared.
    """
    differs = table[1:] != table[:-1]
    common = np.where(differs.any(axis=1), differs.argmax(axis=1), table.shape[1])
    shared: Counts = np.minimum(common, np.minimum(most[1:], most[:-1])).astype(np.int32)
    return shared


def shared_prefixes(common: Counts, min_saved_blocks: int) -> list[SharedPrefix]:
    """The prefixes worth attending to once for all their rows, outer ones before inner ones.

    `common`: `common_prefixes` of sorted tables. Where some rows of a prefix share a longer one,
    the longer one begins where the shorter ends. A prefix that saves too little is left out, and
    those within it begin where the next outer one ends.
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

    An outer run comes after the runs within it. These are the LCP intervals of Abouelhoda, Kurtz
    and Ohlebusch 2004, "Replacing suffix trees with enhanced suffix arrays".
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
