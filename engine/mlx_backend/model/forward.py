"""Which tokens run in one forward of the model, and the index arrays that its layers share."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from engine.mlx_backend.kv.arena import Arena
from engine.mlx_backend.kv.states import StateArena
from kvstore.pool import blocks_for
from kvstore.types import BlockId, SlotId

BlockTable = npt.NDArray[np.uint32]
"""Block ids of several rows, `[rows, blocks]`, padded with the arena's blank block."""


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Consecutive tokens of one sequence to compute, positions [start, start + n_tokens).

    `blocks[i]` holds the positions of the sequence's block `first_block + i`; they cover every
    position up to the last token's. `groups`: the tables of the store's other groups.

    `adapter`: the one that computes them, "" for none.
    `index`: which of the step's spans it is, or is a part of. `first_token`: where its token ids
    begin among the step's. `n_read`: of how many of its last tokens the logits are read.
    """

    start: int
    n_tokens: int
    blocks: npt.NDArray[np.uint32]
    first_block: int = 0
    groups: tuple[npt.NDArray[np.uint32], ...] = ()
    index: int = 0
    first_token: int = 0
    n_read: int = 0
    adapter: str = ""

    @property
    def stop(self) -> int:
        return self.start + self.n_tokens

    def split(self, n_tokens: int) -> Iterator[tuple[int, "TokenSpan"]]:
        """Parts of so many tokens, and how far into the span each begins. All logits are read."""
        for ahead in range(0, self.n_tokens, n_tokens):
            n = min(n_tokens, self.n_tokens - ahead)
            yield ahead, self._part(ahead, n, n)

    def unread_part(self) -> "TokenSpan":
        """The tokens before those whose logits are read."""
        return self._part(0, self.n_tokens - self.n_read, 0)

    def read_part(self) -> "TokenSpan":
        """The tokens whose logits are read."""
        return self._part(self.n_tokens - self.n_read, self.n_read, self.n_read)

    def _part(self, ahead: int, n_tokens: int, n_read: int) -> "TokenSpan":
        start, first_token = self.start + ahead, self.first_token + ahead
        return replace(self, start=start, n_tokens=n_tokens, first_token=first_token, n_read=n_read)


class Forward:
    """Spans as the rows of one array, padded on the right to one length, over one group's arena.

    Padded tokens write to the arena's scratch block; no real token's mask admits them.
    `offset` and `offset_after` are `[rows]`: the position of each row's first token, and the
    position after the last token of the padded row. On the host, int32 `[rows]`: `starts_host` and
    `stops_host`, the positions of each row's first token and after its last, and `first_positions`,
    that of its first key. `n_keys` is how many keys a row has.

    Raises ValueError when a span's blocks do not cover its positions.
    """

    offset: mx.array | int
    offset_after: mx.array | int

    def __init__(self, spans: Sequence[TokenSpan], arena: Arena) -> None:
        self.spans = spans
        self.rows = len(spans)
        self.is_lone = self.rows == 1
        self.length = max(span.n_tokens for span in spans)
        self.table = pad_tables(
            [_needed_blocks(span, arena.block_size) for span in spans], arena.blank
        )
        size = arena.block_size
        bounds = [(span.start, span.stop, span.first_block * size) for span in spans]
        self.starts_host, self.stops_host, self.first_positions = np.array(bounds, np.int32).T
        self.starts = mx.array(self.starts_host)
        self.offset, self.offset_after = self.starts, self.starts + self.length
        self.n_keys = self.table.shape[1] * size
        if self.is_lone:
            self.n_keys = spans[0].stop - spans[0].first_block * size
        self._arena = arena
        self._blocks, self._slots = self._written()
        self._begun = [slot for span in spans for slot in self._begun_slots(span)]
        self._slot_mappings: dict[int, mx.array] = {}
        self._cleared: dict[int, mx.array] = {}
        self._heads: dict[int, mx.array] = {}
        self._masks: dict[int | None, mx.array] = {}

    def slot_mapping(self, kv_heads: int) -> mx.array:
        """The slots for K and V in a layer of `kv_heads`; see `Arena.slot_mapping`."""
        if kv_heads not in self._slot_mappings:
            self._slot_mappings[kv_heads] = self._arena.slot_mapping(
                self._blocks, self._slots, kv_heads
            )
        return self._slot_mappings[kv_heads]

    def cleared(self, kv_heads: int) -> mx.array | None:
        """A slot mapping of what to zero in a layer of `kv_heads`: behind each row's last token.

        None when this forward begins no block that it does not fill: behind the last token of any
        other there is nothing but zeros since it was begun, or copied, and what rejected drafts
        have left. These are numbers: else the tokens computed with them would be none.
        """
        if not self._begun:
            return None
        if kv_heads not in self._cleared:
            blocks, slots = (
                mx.array(column, mx.uint32) for column in zip(*self._begun, strict=True)
            )
            self._cleared[kv_heads] = self._arena.slot_mapping(blocks, slots, kv_heads)
        return self._cleared[kv_heads]

    def heads(self, kv_heads: int) -> mx.array:
        """The padded block table for a layer of `kv_heads`; see `Arena.head_ids`."""
        if kv_heads not in self._heads:
            self._heads[kv_heads] = self._arena.head_ids(mx.array(self.table), kv_heads)
        return self._heads[kv_heads]

    def mask(self, window: int | None = None) -> mx.array:
        """Which keys each token sees, boolean `[rows, 1, length, keys]`.

        Keys are those of the whole table, or for one row alone of exactly its positions. With a
        window a token sees itself and the `window - 1` tokens before it.
        """
        if window not in self._masks:
            self._masks[window] = self._make_mask(window)
        return self._masks[window]

    def _begun_slots(self, span: TokenSpan) -> list[tuple[BlockId, int]]:
        """Block and slot of what lies behind a span, if it begins the block that it ends in."""
        size = self._arena.block_size
        filled = span.stop % size
        if filled == 0 or filled > span.n_tokens:
            return []
        block = BlockId(int(span.blocks[span.stop // size - span.first_block]))
        return [(block, slot) for slot in range(filled, size)]

    def _make_mask(self, window: int | None) -> mx.array:
        positions = self.starts[:, None] + mx.arange(self.length)
        lasts = mx.array(self.stops_host - 1)[:, None]
        # What is padded sees what its row's last token does: a softmax over nothing is no number.
        queries = mx.minimum(positions, lasts)[:, None, :, None]
        keys = mx.arange(self.n_keys)
        if self.first_positions.any():
            keys = keys + mx.array(self.first_positions)[:, None, None, None]
        mask = keys <= queries
        return mask if window is None else mask & (keys > queries - window)

    def _written(self) -> tuple[mx.array, mx.array]:
        """Block and slot of every token, `[rows * length]`, row by row."""
        positions = self.starts_host[:, None] + np.arange(self.length, dtype=np.int32)
        held = positions - self.first_positions[:, None]
        entries, slots = np.divmod(held, self._arena.block_size)
        padding = positions >= self.stops_host[:, None]
        entries[padding] = 0
        blocks = self.table[np.arange(self.rows)[:, None], entries]
        blocks[padding] = self._arena.scratch
        return mx.array(blocks.ravel()), mx.array(slots.ravel())


class LoneForward(Forward):
    """One row, whose position the model wants as a Python number."""

    def __init__(self, spans: Sequence[TokenSpan], arena: Arena) -> None:
        super().__init__(spans, arena)
        (span,) = spans
        self.offset, self.offset_after = span.start, span.stop


class GroupedMaskForward(Forward):
    """For models that keep the heads of a KV head apart: masks `[rows, 1, 1, length, keys]`."""

    def _make_mask(self, window: int | None) -> mx.array:
        return super()._make_mask(window)[:, :, None]


def _needed_blocks(span: TokenSpan, block_size: int) -> npt.NDArray[np.uint32]:
    needed = blocks_for(span.stop, block_size) - span.first_block
    if len(span.blocks) < needed or span.first_block * block_size > span.start:
        raise ValueError(
            f"{len(span.blocks)} blocks from the {span.first_block}-th on do not cover the "
            f"positions {span.start} to {span.stop}"
        )
    return span.blocks[:needed]


def table_width(n_blocks: int) -> int:
    """At least `n_blocks`, at most an eighth more, and one of eight widths in each octave.

    What is gathered by a table then has sizes that come back, so that MLX finds its buffers again
    and a GPU its graphs, while rows grow. What attends block by block reads no padding.
    """
    step = 1 << max(0, (n_blocks - 1).bit_length() - 4)
    return -(-n_blocks // step) * step


def pad_tables(tables: Sequence[npt.NDArray[np.uint32]], blank: BlockId) -> BlockTable:
    """Tables of different lengths as one array, of a `table_width`."""
    width = table_width(max(len(table) for table in tables))
    padded = np.full((len(tables), width), blank, dtype=np.uint32)
    for row, table in enumerate(tables):
        padded[row, : len(table)] = table
    return padded


Indices = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The spans of one forward. Each row group attends by itself, its spans side by side as rows.

    One row group has the shape `[rows, length]`, padded on the right. Several, whose spans are not
    padded, lie one behind the other as `[tokens, 1]`: each token is a row. So all that a model does
    for every token by itself is done once for all row groups: weights are read once.
    """

    row_groups: tuple[tuple[TokenSpan, ...], ...]

    @property
    def spans(self) -> Iterator[TokenSpan]:
        """In the order of the forward's tokens."""
        return (span for group in self.row_groups for span in group)

    @property
    def is_read(self) -> bool:
        """Whether any logits are read."""
        return any(span.n_read for span in self.spans)

    @property
    def unread(self) -> frozenset[int]:
        """Indices of the row groups of which no logits are read."""
        return frozenset(
            index
            for index, group in enumerate(self.row_groups)
            if not any(span.n_read for span in group)
        )

    def token_indices(self) -> Indices:
        """Where each token's id stands among the step's, in the shape of the forward."""
        grids = [_token_grid(group) for group in self.row_groups]
        if len(grids) == 1:
            return grids[0]
        return np.concatenate([grid.ravel() for grid in grids])[:, None]

    def row_adapters(self) -> list[str]:
        """The adapter of each row of the forward's shape; "" for none."""
        if len(self.row_groups) == 1:
            return [span.adapter for span in self.spans]
        return [span.adapter for span in self.spans for _ in range(span.n_tokens)]

    def read_indices(self) -> Indices:
        """Which tokens' logits are read, counted over the forward's shape, span after span."""
        found, base = list[npt.NDArray[np.int32]](), 0
        for group in self.row_groups:
            length = max(span.n_tokens for span in group)
            for span in group:
                stop = base + span.n_tokens
                found.append(np.arange(stop - span.n_read, stop, dtype=np.int32))
                base += length
        return np.concatenate(found)


class StepForwards(NamedTuple):
    """A step's forwards: first those of which no logits are read."""

    prompts: list[ForwardBatch]
    sampling: list[ForwardBatch]


def _token_grid(group: Sequence[TokenSpan]) -> Indices:
    """`[rows, length]`; what is padded repeats the row's last token."""
    counts = np.array([span.n_tokens for span in group], dtype=np.int32)
    firsts = np.array([span.first_token for span in group], dtype=np.int32)
    within = np.arange(counts.max(), dtype=np.int32)
    return firsts[:, None] + np.minimum(within, counts[:, None] - 1)


FORWARD_TOKENS = 16
"""What one more forward costs, in tokens computed: padding below this is cheaper than a forward.

A forward reads all weights however few its tokens are: with 27 M parameters on two cores one row of
one token takes 12 ms without attention, and a token more in a chunk 0.6 ms.
"""

RowGroups = list[list[int]]
"""Spans that run side by side as rows, as lists of indices into some spans."""


@dataclass(frozen=True, slots=True)
class ForwardCost:
    """What one more forward costs: as much as padding rows by so many tokens, or by so many keys
    that attention reads for each.

    `most_keys`: those that one forward of several rows may read. `layers`: of how many the model
    has; a span whose logits are not read has the last one computed in vain, but for attention,
    where it shares a forward with others.
    `context_tokens`: no row is padded beyond the last of these positions.
    """

    tokens: int
    keys: float
    most_keys: float = math.inf
    layers: int = 1
    context_tokens: float = math.inf

    def joins(self, span: TokenSpan) -> bool:
        """Whether computing its last layer in vain costs no more than one more forward."""
        return (span.n_tokens - span.n_read) / self.layers <= self.tokens


Grouping = Callable[[Sequence[TokenSpan], ForwardCost], RowGroups]
"""Splits spans into groups of rows side by side, where padding would cost more than one more."""


def group_by_length(lengths: Sequence[int], most_padding: float) -> RowGroups:
    """Split what is padded to one length into groups, as lists of indices into `lengths`.

    They are taken longest first; each joins the group before it unless the padding of that group
    would then outweigh one more. Within a group they stay in order.
    """
    groups: RowGroups = []
    longest = padding = 0
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        padding += longest - lengths[index]
        if not groups or padding > most_padding:
            groups.append([])
            longest, padding = lengths[index], 0
        groups[-1].append(index)
    return [sorted(group) for group in groups]


def padded(spans: Sequence[TokenSpan], cost: ForwardCost) -> RowGroups:
    """Rows of like length and like context, padded to the longest."""
    return [
        [group[index] for index in rows]
        for alike in group_by_length([span.n_tokens for span in spans], cost.tokens)
        for group in _within_context(alike, spans, cost.context_tokens)
        for rows in group_by_length([spans[index].stop for index in group], cost.keys)
    ]


def _within_context(
    group: Sequence[int], spans: Sequence[TokenSpan], context_tokens: float
) -> RowGroups:
    """Rows that can be padded to the longest, and the others by their lengths: a model with a table
    of positions has none behind them, and MLX reads on where a table ends.
    """
    length = max(spans[index].n_tokens for index in group)
    fitting = [index for index in group if spans[index].start + length <= context_tokens]
    others = [index for index in group if spans[index].start + length > context_tokens]
    alike = group_by_length([spans[index].n_tokens for index in others], 0)
    groups = [fitting, *([others[index] for index in rows] for rows in alike)]
    return [rows for rows in groups if rows]


def of_equal_length(spans: Sequence[TokenSpan], cost: ForwardCost) -> RowGroups:
    """Rows of one length: for recurrent layers that take padding for tokens."""
    return padded(spans, replace(cost, tokens=0))


def fresh_apart(spans: Sequence[TokenSpan], cost: ForwardCost) -> RowGroups:
    """Of equal length, and those that begin apart: for layers that have no initial state."""
    groups = [
        [index for index in group if (spans[index].start == 0) is is_fresh]
        for group in of_equal_length(spans, cost)
        for is_fresh in (True, False)
    ]
    return [group for group in groups if group]


def one_by_one(spans: Sequence[TokenSpan], cost: ForwardCost) -> RowGroups:
    """Each row alone: for models that ask for one position, or count keys from the end."""
    return [[index] for index in range(len(spans))]


def bounded(grouping: Grouping) -> Grouping:
    """The same grouping, with no group of several rows whose rows x longest exceed `most_keys`.

    A row alone may have any number of keys.
    """

    def group(spans: Sequence[TokenSpan], cost: ForwardCost) -> RowGroups:
        found = grouping(spans, cost)
        return [rows for whole in found for rows in _split(whole, spans, cost.most_keys)]

    return group


def _split(whole: list[int], spans: Sequence[TokenSpan], most_keys: float) -> RowGroups:
    """Groups of neighbours: rows that share a prefix stay together as far as they fit."""
    groups: RowGroups = []
    longest = 0
    for index in whole:
        longest = max(longest, spans[index].stop)
        if groups and (len(groups[-1]) + 1) * longest <= most_keys:
            groups[-1].append(index)
        else:
            groups.append([index])
            longest = spans[index].stop
    return groups


Arrangement = Callable[[Sequence[TokenSpan], ForwardCost], StepForwards]
"""Splits a step's spans into forwards. The tokens of a span that are read are in one forward."""


ReadStates = Callable[[StateArena, Sequence[SlotId], bool], Sequence[mx.array | None]]
"""The arrays of some slots' states as the model is given them; whether all slots are fresh."""


def initial_or_saved(
    states: StateArena, slots: Sequence[SlotId], is_fresh: bool
) -> Sequence[mx.array | None]:
    """A fresh row begins with zeros, so that it can run beside others."""
    return states.read(slots)


def none_or_saved(
    states: StateArena, slots: Sequence[SlotId], is_fresh: bool
) -> Sequence[mx.array | None]:
    """A fresh row begins with nothing, as in mlx-lm."""
    return [None] * len(states.shapes) if is_fresh else states.read(slots)


@dataclass(frozen=True, slots=True)
class Batching:
    """A rung of the ladder: which rows run side by side, and what their caches give them."""

    name: str
    arrange: Arrangement
    forward: type[Forward] = Forward
    read_states: ReadStates = initial_or_saved


def joined(spans: Sequence[TokenSpan], cost: ForwardCost) -> StepForwards:
    """Short spans and what is read of long ones in one forward, as far as their keys allow: each
    token is a row there. What comes before is computed as in `read_apart`.
    """
    short = [span for span in spans if cost.joins(span)]
    long = [span for span in spans if not cost.joins(span)]
    prompts, read = _split_at_read(long)
    whole = [*read, *short]
    rows = [span for span in whole if span.n_tokens > 1]
    single = [span for span in whole if span.n_tokens == 1]
    groups = [
        *_row_groups(_neighbours(rows), of_equal_length, cost),
        *_row_groups(_neighbours(single), padded, cost),
    ]
    batches = list(_filled(groups, cost.most_keys))
    return StepForwards(
        [
            *(ForwardBatch((group,)) for group in _row_groups(prompts, padded, cost)),
            *(batch for batch in batches if not batch.is_read),
        ],
        [batch for batch in batches if batch.is_read],
    )


def read_apart(grouping: Grouping) -> Arrangement:
    """Spans of like length side by side, and the tokens of theirs that are read with the decodes:
    so logits are computed for these alone, and a state may be saved before them.
    """

    def arrange(spans: Sequence[TokenSpan], cost: ForwardCost) -> StepForwards:
        prompts, read = _split_at_read(spans)
        return StepForwards(
            [ForwardBatch((group,)) for group in _row_groups(prompts, grouping, cost)],
            [ForwardBatch((group,)) for group in _row_groups(_neighbours(read), grouping, cost)],
        )

    return arrange


def _split_at_read(spans: Sequence[TokenSpan]) -> tuple[list[TokenSpan], list[TokenSpan]]:
    """What no logits are read of, and what they are read of, however many tokens of a span."""
    ahead = [span.unread_part() for span in spans]
    return (
        [span for span in ahead if span.n_tokens],
        [span.read_part() for span in spans if span.n_read],
    )


def _neighbours(spans: Sequence[TokenSpan]) -> list[TokenSpan]:
    """Rows that share a prefix side by side."""
    return sorted(spans, key=lambda span: span.blocks.tobytes())


def _row_groups(
    spans: Sequence[TokenSpan], grouping: Grouping, cost: ForwardCost
) -> list[tuple[TokenSpan, ...]]:
    groups = bounded(grouping)(spans, cost)
    return [tuple(spans[index] for index in group) for group in groups]


def _filled(groups: Iterable[tuple[TokenSpan, ...]], most_keys: float) -> Iterator[ForwardBatch]:
    """As few forwards as hold these row groups in this order, with at most so many keys each."""
    batch, keys = list[tuple[TokenSpan, ...]](), 0
    for group in groups:
        own = len(group) * max(span.stop for span in group)
        if batch and keys + own > most_keys:
            yield ForwardBatch(tuple(batch))
            batch, keys = [], 0
        batch.append(group)
        keys += own
    if batch:
        yield ForwardBatch(tuple(batch))


LADDER = (
    Batching("joined rows", joined),
    Batching("padded rows", read_apart(padded)),
    Batching("padded rows with masks by KV head", read_apart(padded), GroupedMaskForward),
    Batching("rows of equal length", read_apart(of_equal_length)),
    Batching(
        "rows of equal length, fresh ones apart", read_apart(fresh_apart), Forward, none_or_saved
    ),
    Batching("one row at a time", read_apart(one_by_one), LoneForward, none_or_saved),
)
"""From the fewest forwards to the most. The check at load takes the first that is right."""
