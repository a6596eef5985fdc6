"""Which of a step's tokens share a forward of the model: a ladder of rules, best to slowest."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from engine.mlx_backend.model.rows import TokenSpan

Indices = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The spans of one forward, in row groups. The spans of a group are rows that attend together.

    One row group has the shape `[rows, length]`, padded on the right. Several, whose spans are not
    padded, follow one another as `[tokens, 1]`: each token is a row. What a model computes for each
    token by itself is then computed once for all row groups, and weights are read once.
    """

    row_groups: Sequence[Sequence[TokenSpan]]

    @property
    def spans(self) -> Iterator[TokenSpan]:
        """All spans, in the order of the forward's tokens."""
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
        """The index of each token's id among the step's, in the shape of the forward. Padding
        repeats the row's last token.
        """
        grids = list[Indices]()
        for group in self.row_groups:
            counts = np.array([span.n_tokens for span in group], dtype=np.int32)
            firsts = np.array([span.first_token for span in group], dtype=np.int32)
            within = np.arange(counts.max(), dtype=np.int32)
            grids.append(firsts[:, None] + np.minimum(within, counts[:, None] - 1))
        if len(grids) == 1:
            return grids[0]
        return np.concatenate([grid.ravel() for grid in grids])[:, None]

    def row_adapters(self) -> list[str]:
        """The adapter of each row of the forward's shape; "" for none."""
        if len(self.row_groups) == 1:
            return [span.adapter for span in self.spans]
        return [span.adapter for span in self.spans for _ in range(span.n_tokens)]

    def read_indices(self) -> Indices:
        """The indices of the tokens whose logits are read, counted over the forward's shape, span
        after span.
        """
        found, base = list[Indices](), 0
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


FORWARD_TOKENS = 16
"""The cost of one more forward, in tokens computed: less padding than this is cheaper.

A forward reads all weights however few its tokens are: with 27 M parameters on two cores one row of
one token takes 12 ms without attention, and a token more in a chunk 0.6 ms.
"""

RowGroups: TypeAlias = list[list[TokenSpan]]
"""Groups of spans, each to be computed as rows of one forward."""


@dataclass(frozen=True, slots=True)
class ForwardCost:
    """The cost of one more forward, as the padding that costs as much: `tokens` more tokens of
    rows, or `keys` more keys that attention reads.

    `most_keys`: the most that one forward of several rows may read.
    `layers`: the number of the model's layers. A span whose logits are not read has the last one
    computed in vain, except for attention, where it shares a forward with others.
    `context_tokens`: no row is padded beyond the last of these positions. `in_place_tokens`: rows
    of up to this many tokens read their keys in place, however many and unlike these are.
    """

    tokens: int
    keys: float
    most_keys: float = math.inf
    layers: int = 1
    context_tokens: float = math.inf
    in_place_tokens: int = 0

    def gathered_keys(self, spans: Sequence[TokenSpan]) -> int:
        """The keys that are gathered for rows that attend together, padding included."""
        if max(span.n_tokens for span in spans) <= self.in_place_tokens:
            return 0
        return len(spans) * max(span.stop for span in spans)

    def joins(self, span: TokenSpan) -> bool:
        """Whether computing its last layer in vain costs no more than one more forward."""
        return (span.n_tokens - span.n_read) / self.layers <= self.tokens


Grouping: TypeAlias = Callable[[Sequence[TokenSpan], ForwardCost], RowGroups]
"""Splits spans into row groups, where padding would cost more than one more forward."""


def group_by_length(lengths: Sequence[int], most_padding: float) -> list[list[int]]:
    """Split what is padded to one length into groups, as lists of indices into `lengths`.

    They are taken longest first; each joins the group before it unless the padding of that group
    would then outweigh one more. Within a group they stay in order.
    """
    groups: list[list[int]] = []
    longest = padding = 0
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        padding += longest - lengths[index]
        if not groups or padding > most_padding:
            groups.append([])
            longest, padding = lengths[index], 0
        groups[-1].append(index)
    return [sorted(group) for group in groups]


def _of_like_length(spans: Sequence[TokenSpan], most_padding: float) -> RowGroups:
    groups = group_by_length([span.n_tokens for span in spans], most_padding)
    return [[spans[index] for index in group] for group in groups]


def padded(spans: Sequence[TokenSpan], cost: ForwardCost) -> RowGroups:
    """Rows of like length and like context, padded to the longest."""
    return [
        [group[index] for index in rows]
        for alike in _of_like_length(spans, cost.tokens)
        for group in _within_context(alike, cost.context_tokens)
        for rows in group_by_length(
            [span.stop for span in group], cost.keys if cost.gathered_keys(group) else math.inf
        )
    ]


def _within_context(spans: Sequence[TokenSpan], context_tokens: float) -> RowGroups:
    """Rows that can be padded to the longest, and the others by their lengths: a model with a table
    of positions has none after the last, and MLX would read past the end of the table.
    """
    length = max(span.n_tokens for span in spans)
    fitting = [span for span in spans if span.start + length <= context_tokens]
    others = [span for span in spans if span.start + length > context_tokens]
    return [group for group in (fitting, *_of_like_length(others, 0)) if group]


def of_equal_length(spans: Sequence[TokenSpan], cost: ForwardCost) -> RowGroups:
    """Rows of one length: for recurrent layers that do not tell padding from tokens."""
    return padded(spans, replace(cost, tokens=0))


def fresh_apart(spans: Sequence[TokenSpan], cost: ForwardCost) -> RowGroups:
    """Rows of one length, those that begin a sequence apart from the others: for layers that have
    no initial state.
    """
    groups = [
        [span for span in group if (span.start == 0) is is_fresh]
        for group in of_equal_length(spans, cost)
        for is_fresh in (True, False)
    ]
    return [group for group in groups if group]


def one_by_one(spans: Sequence[TokenSpan], cost: ForwardCost) -> RowGroups:
    """Each row alone: for models that ask for one position, or count keys from the end."""
    return [[span] for span in spans]


def row_groups(spans: Sequence[TokenSpan], grouping: Grouping, cost: ForwardCost) -> RowGroups:
    """The groups that a rule makes, split where several rows x longest exceed `most_keys`.

    Rows that are neighbours, and may share a prefix, stay together as far as they fit. A row alone
    may have any number of keys.
    """
    groups: RowGroups = []
    for whole in grouping(spans, cost):
        if not cost.gathered_keys(whole):
            groups.append(whole)
            continue
        rows, longest = list[TokenSpan](), 0
        for span in whole:
            longest = max(longest, span.stop)
            if rows and (len(rows) + 1) * longest <= cost.most_keys:
                rows.append(span)
            else:
                rows, longest = [span], span.stop
                groups.append(rows)
    return groups


Arrangement: TypeAlias = Callable[[Sequence[TokenSpan], ForwardCost], StepForwards]
"""Splits a step's spans into forwards. The tokens of a span that are read are in one forward."""


def joined(spans: Sequence[TokenSpan], cost: ForwardCost) -> StepForwards:
    """Short spans and the tokens that are read of long ones in one forward, as far as their keys
    allow: each token is a row there. The other tokens are computed as in `read_apart`.
    """
    short = [span for span in spans if cost.joins(span)]
    prompts, read = _split_at_read([span for span in spans if not cost.joins(span)])
    whole = _neighbours([*read, *short])
    groups = [
        *row_groups([span for span in whole if span.n_tokens > 1], of_equal_length, cost),
        *row_groups([span for span in whole if span.n_tokens == 1], padded, cost),
    ]
    batches = list(_filled(groups, cost))
    return StepForwards(
        [
            *(ForwardBatch([group]) for group in row_groups(prompts, padded, cost)),
            *(batch for batch in batches if not batch.is_read),
        ],
        [batch for batch in batches if batch.is_read],
    )


def read_apart(grouping: Grouping) -> Arrangement:
    """Groups the tokens of prompts apart from those that are read, which share forwards with the
    decodes: so logits are computed for these alone, and a state may be saved before them.
    """

    def arrange(spans: Sequence[TokenSpan], cost: ForwardCost) -> StepForwards:
        prompts, read = _split_at_read(spans)
        return StepForwards(
            [ForwardBatch([group]) for group in row_groups(prompts, grouping, cost)],
            [ForwardBatch([group]) for group in row_groups(_neighbours(read), grouping, cost)],
        )

    return arrange


def _split_at_read(spans: Sequence[TokenSpan]) -> tuple[list[TokenSpan], list[TokenSpan]]:
    """The tokens whose logits are not read, and those whose logits are."""
    ahead = [span.unread_part() for span in spans]
    return (
        [span for span in ahead if span.n_tokens],
        [span.read_part() for span in spans if span.n_read],
    )


def _neighbours(spans: Sequence[TokenSpan]) -> list[TokenSpan]:
    """The spans sorted by table, so that rows that share a prefix are neighbours."""
    return sorted(spans, key=lambda span: span.blocks.tobytes())


def _filled(groups: Iterable[list[TokenSpan]], cost: ForwardCost) -> Iterator[ForwardBatch]:
    """As few forwards as hold these row groups in order, with at most `most_keys` keys each."""
    batch, keys = RowGroups(), 0
    for group in groups:
        own = cost.gathered_keys(group)
        if batch and keys + own > cost.most_keys:
            yield ForwardBatch(batch)
            batch, keys = [], 0
        batch.append(group)
        keys += own
    if batch:
        yield ForwardBatch(batch)


@dataclass(frozen=True, slots=True)
class Batching:
    """A rung of the ladder: which rows share a forward, and what the model is given for them.

    `stands_in`: K, V and masks stand in for those of several row groups; see `ArenaForward`.
    `masks_by_head`: masks are `[rows, 1, 1, length, keys]`, for models that keep the query heads of
    a KV head apart. `int_offsets`: a forward has one row, whose position is a Python number; such a
    model cannot be traced. `starts_empty`: the recurrent state of a row that begins a sequence is
    None, as in mlx-lm; otherwise it is zeros, so that the row can share a forward with others.
    """

    name: str
    arrange: Arrangement
    stands_in: bool = False
    masks_by_head: bool = False
    int_offsets: bool = False
    starts_empty: bool = False


LADDER = (
    Batching("joined rows", joined, stands_in=True),
    Batching("padded rows", read_apart(padded)),
    Batching("padded rows with masks by KV head", read_apart(padded), masks_by_head=True),
    Batching("rows of equal length", read_apart(of_equal_length)),
    Batching("rows of equal length, fresh ones apart", read_apart(fresh_apart), starts_empty=True),
    Batching("one row at a time", read_apart(one_by_one), int_offsets=True, starts_empty=True),
)
"""From the fewest forwards to the most. The check at load takes the first that is right."""
