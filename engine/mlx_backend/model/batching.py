"""Which of a step's tokens share a forward of the model: a ladder of rules, best to slowest."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from engine.mlx_backend.kv.states import StateArena
from engine.mlx_backend.model.rows import (
    DecodeRows,
    GroupedMaskDecodeRows,
    GroupedMasks,
    LoneRow,
    RowGroup,
    TokenSpan,
)
from kvstore.types import SlotId

Indices = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The spans of one forward. Each row group attends by itself, its spans side by side as rows.

    One row group has the shape `[rows, length]`, padded on the right. Several, whose spans are not
    padded, follow one another as `[tokens, 1]`: each token is a row. So all that a model does
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
    """What one more forward costs, as the padding that costs as much: `tokens` more tokens of rows,
    or `keys` more keys that attention reads.

    `most_keys`: the most that one forward of several rows may read.
    `layers`: the number of the model's layers. A span whose logits are not read has the last one
    computed in vain, but for attention, where it shares a forward with others.
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
    of positions has none after the last, and MLX reads on where a table ends.
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
    """A fresh row begins with zeros, so that it can share a forward with others."""
    return states.read(slots)


def none_or_saved(
    states: StateArena, slots: Sequence[SlotId], is_fresh: bool
) -> Sequence[mx.array | None]:
    """A fresh row begins with nothing, as in mlx-lm."""
    return [None] * len(states.shapes) if is_fresh else states.read(slots)


@dataclass(frozen=True, slots=True)
class Batching:
    """A rung of the ladder: which rows run side by side, and what their caches give them.

    `rows`, and `decode_rows` while a decode step is traced, make the index arrays; a model without
    `decode_rows` cannot be traced. `stands_in`: see `ArenaForward`.
    """

    name: str
    arrange: Arrangement
    rows: type[RowGroup] = RowGroup
    decode_rows: type[DecodeRows] | None = DecodeRows
    read_states: ReadStates = initial_or_saved
    stands_in: bool = False


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
    """As few forwards as hold these row groups in order, with at most `most_keys` keys each."""
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
    Batching("joined rows", joined, stands_in=True),
    Batching("padded rows", read_apart(padded)),
    Batching(
        "padded rows with masks by KV head",
        read_apart(padded),
        GroupedMasks,
        GroupedMaskDecodeRows,
    ),
    Batching("rows of equal length", read_apart(of_equal_length)),
    Batching(
        "rows of equal length, fresh ones apart",
        read_apart(fresh_apart),
        read_states=none_or_saved,
    ),
    Batching(
        "one row at a time",
        read_apart(one_by_one),
        LoneRow,
        decode_rows=None,
        read_states=none_or_saved,
    ),
)
"""From the fewest forwards to the most. The check at load takes the first that is right."""
