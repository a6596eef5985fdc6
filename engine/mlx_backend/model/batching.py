"""How a step's tokens may share a forward: a ladder of rules, from best to slowest."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx

from engine.mlx_backend.model.forward import Forward, GroupedMaskForward, LoneForward
from engine.mlx_backend.model.forward_batch import ForwardBatch, Run, StepForwards
from engine.mlx_backend.model.grouping import (
    ForwardCost,
    Grouping,
    bounded,
    fresh_apart,
    of_equal_length,
    one_by_one,
    padded,
)
from engine.mlx_backend.storage.state_arena import StateArena
from kvstore.types import SlotId

Arrangement = Callable[[Sequence[Run], ForwardCost], StepForwards]
"""Splits a step's runs into forwards. Of each run at most the last token's logits are read."""


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


def joined(runs: Sequence[Run], cost: ForwardCost) -> StepForwards:
    """Short runs and the last tokens of long ones in one forward, as far as their keys allow: each
    token is a row there. What comes before is computed as in `lasts_apart`.
    """
    short = [run for run in runs if cost.joins(run.piece)]
    long = [run for run in runs if not cost.joins(run.piece)]
    prompts, lasts = _parted(long)
    rows = [run for run in short if run.piece.n_tokens > 1]
    single = [*lasts, *(run for run in short if run.piece.n_tokens == 1)]
    parts = [*_parts(rows, of_equal_length, cost), *_parts(_neighbours(single), padded, cost)]
    batches = list(_filled(parts, cost.most_keys))
    return StepForwards(
        [
            *(ForwardBatch((part,)) for part in _parts(prompts, padded, cost)),
            *(batch for batch in batches if not batch.is_read),
        ],
        [batch for batch in batches if batch.is_read],
    )


def lasts_apart(grouping: Grouping) -> Arrangement:
    """Runs of like length side by side, and the last tokens of those that are read with the
    decodes: so logits are computed for these alone, and a state may be saved before them.
    """

    def arrange(runs: Sequence[Run], cost: ForwardCost) -> StepForwards:
        prompts, lasts = _parted(runs)
        return StepForwards(
            [ForwardBatch((part,)) for part in _parts(prompts, grouping, cost)],
            [ForwardBatch((part,)) for part in _parts(_neighbours(lasts), grouping, cost)],
        )

    return arrange


def _parted(runs: Sequence[Run]) -> tuple[list[Run], list[Run]]:
    """What nobody reads the logits of, and the last tokens of those that are read."""
    ahead = [run.without_last() if run.n_read else run for run in runs]
    return (
        [run for run in ahead if run.piece.n_tokens],
        [run.last() for run in runs if run.n_read],
    )


def _neighbours(runs: Sequence[Run]) -> list[Run]:
    """Rows that share a prefix side by side."""
    return sorted(runs, key=lambda run: run.piece.blocks.tobytes())


def _parts(runs: Sequence[Run], grouping: Grouping, cost: ForwardCost) -> list[tuple[Run, ...]]:
    groups = bounded(grouping)([run.piece for run in runs], cost)
    return [tuple(runs[index] for index in group) for group in groups]


def _filled(parts: Iterable[tuple[Run, ...]], most_keys: float) -> Iterator[ForwardBatch]:
    """As few forwards as hold these parts in this order, with at most so many keys each."""
    batch, keys = list[tuple[Run, ...]](), 0
    for part in parts:
        own = len(part) * max(run.piece.stop for run in part)
        if batch and keys + own > most_keys:
            yield ForwardBatch(tuple(batch))
            batch, keys = [], 0
        batch.append(part)
        keys += own
    if batch:
        yield ForwardBatch(tuple(batch))


LADDER = (
    Batching("joined rows", joined),
    Batching("padded rows", lasts_apart(padded)),
    Batching("padded rows with masks by KV head", lasts_apart(padded), GroupedMaskForward),
    Batching("rows of equal length", lasts_apart(of_equal_length)),
    Batching(
        "rows of equal length, fresh ones apart", lasts_apart(fresh_apart), Forward, none_or_saved
    ),
    Batching("one row at a time", lasts_apart(one_by_one), LoneForward, none_or_saved),
)
"""From the fewest forwards to the most. The check at load takes the first that is right."""
