"""How a step's tokens may share a forward: a ladder of rules, from best to slowest."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx

from engine.mlx_backend.model.forward import Forward, GroupedMaskForward, LoneForward, TokenSpan
from engine.mlx_backend.model.forward_batch import (
    ForwardBatch,
    ForwardCost,
    Grouping,
    StepForwards,
    bounded,
    fresh_apart,
    of_equal_length,
    one_by_one,
    padded,
)
from engine.mlx_backend.storage.state_arena import StateArena
from kvstore.types import SlotId

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
