"""A step between its submission and its results: the arrays to compute, and what they say."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import mlx.core as mx
import numpy as np

from engine.core.step import (
    DraftPlan,
    Failed,
    Late,
    Prefilled,
    Row,
    RowResult,
    Sampled,
    SampledToken,
    SequenceId,
    Vector,
    Verified,
    Verify,
)
from engine.mlx_backend.kv.storage import PendingReads
from engine.mlx_backend.model.cached_model import PendingVectors
from engine.mlx_backend.sampling.sampler import Drawn, Scored
from engine.mlx_backend.verify import StepDraws
from engine.values.output import TokenLogprob

UNUSABLE = "the model's logits leave no token to choose: not a number, or all ruled out"
NO_VECTOR = "the model's hidden states are no numbers"


@dataclass(frozen=True, slots=True)
class PendingForward:
    """A forward that has been built and not launched: the arrays to evaluate.

    `first_layer`: those of its first layer, which may be launched ahead of the others. `read`: of
    blocks that are copied before it; each list is computed before the next one is launched.
    """

    arrays: list[mx.array]
    first_layer: list[mx.array] = field(default_factory=list)
    read: list[list[mx.array]] = field(default_factory=list)


AcceptedTokens: TypeAlias = Mapping[SequenceId, Sequence[SampledToken]]
"""Of each row that was drawn; no tokens where one of them could not be drawn."""

GivenUp: TypeAlias = tuple[bool, bool]
"""Whether the attention, and whether compiled functions, have failed and compute no more steps."""


@dataclass(slots=True)
class SubmittedStep:
    """A step that has been submitted and not collected. Once `awaited` has been evaluated, all of
    it is computed.

    `given_up`: what had failed before. `is_lost`: it was in flight when the storage was lost.
    """

    rows: Sequence[Row]
    given_up: GivenUp
    is_lost: bool = False
    late: frozenset[SequenceId] = frozenset()
    unlaunched: Iterator[PendingForward] = field(default_factory=lambda: iter(()))
    draws: StepDraws = field(default_factory=StepDraws)
    drawn: Drawn | None = None
    scored: dict[SequenceId, list[Scored]] = field(default_factory=dict)
    pooled: list[PendingVectors] = field(default_factory=list)
    reads: PendingReads | None = None
    awaited: list[mx.array] = field(default_factory=list)
    read: list[list[mx.array]] = field(default_factory=list)  # of copied blocks, for a forward
    is_compiled: bool = False
    draft: DraftPlan | None = None

    def pending(
        self, arrays: list[mx.array], first_layer: Sequence[mx.array] = ()
    ) -> PendingForward:
        """A forward of this step, to be launched."""
        self.awaited += arrays
        read, self.read = self.read, []
        return PendingForward(arrays, list(first_layer), read)

    def accept_tokens(self) -> AcceptedTokens:
        """Read the step's draws, and move its rows to after the accepted tokens."""
        found: dict[SequenceId, Sequence[SampledToken]] = {}
        tokens = self.drawn.read() if self.drawn is not None else []
        for one, accepted in self.draws.accepted_tokens(tokens):
            if accepted is not None:
                one.accept(accepted)
            found[one.row.sequence_id] = accepted or ()
        return found

    def results(self, accepted: AcceptedTokens) -> tuple[RowResult, ...]:
        """The result of each of the step's rows."""
        scores = {sequence_id: _scores_of(parts) for sequence_id, parts in self.scored.items()}
        vectors = dict[SequenceId, Vector](one for part in self.pooled for one in part.read())

        def result(row: Row) -> RowResult:
            sequence_id = row.sequence_id
            own_scores = scores.get(sequence_id, ())
            tokens = accepted.get(sequence_id)
            if own_scores is None or (tokens is not None and not tokens):
                return Failed(UNUSABLE)
            if sequence_id in self.late:
                return Late(own_scores)
            if tokens is not None and isinstance(row, Verify):
                return Verified(tuple(tokens))
            if tokens is not None:
                return Sampled(tokens[0], own_scores)
            vector = vectors.get(sequence_id)
            if vector is not None and not np.isfinite(vector).all():
                return Failed(NO_VECTOR)
            return Prefilled(own_scores, vector)

        return tuple(map(result, self.rows))


def _scores_of(parts: Sequence[Scored]) -> tuple[TokenLogprob, ...] | None:
    """The scores of a row's tokens; None where any of its logits are no distribution."""
    scores = list[TokenLogprob]()
    for part in parts:
        if (part_scores := part.read()) is None:
            return None
        scores += part_scores
    return tuple(scores)
