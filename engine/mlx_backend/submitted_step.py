"""A step between its submission and its results: the arrays to compute, what it draws for each row
(one token, and one after each draft token that it verifies), and what the draws say.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeAlias

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
    StepMasks,
    Vector,
    Verified,
    Verify,
)
from engine.mlx_backend.batch import BatchRow
from engine.mlx_backend.kv.storage import PendingReads
from engine.mlx_backend.model.cached_model import PendingVectors
from engine.mlx_backend.sampling.edits import SamplingRow
from engine.mlx_backend.sampling.sampler import Drawn, Scored
from engine.values.output import TokenLogprob

UNUSABLE = "the model's logits leave no token to choose: not a number, or all ruled out"
NOT_FINITE = "an image of the prompt cannot be encoded: its features are not numbers"
NO_VECTOR = "the model's hidden states are no numbers"


@dataclass(frozen=True, slots=True)
class RowDraws:
    """The draws of one row: one after its last own token, and one after each of its drafts.

    The row's position is after the drafts until it is known which of them are accepted.
    """

    row: BatchRow
    drafts: tuple[int, ...] = ()

    @property
    def n(self) -> int:
        return 1 + len(self.drafts)

    def truncate(self, n: int) -> "RowDraws":
        """Its first `n` draws. The row continues before the drafts after which nothing is drawn."""
        self.row.rewind(self.n - n)
        return RowDraws(self.row, self.drafts[: n - 1])

    def states(self) -> Iterator[SamplingRow]:
        """The sampling state of each draw: as if all drafts before it were accepted."""
        state = self.row.sampling
        yield state
        for draft in self.drafts:
            state = state.followed_by(draft)
            yield state

    def accepted_tokens(
        self, drawn: Sequence[SampledToken | None]
    ) -> tuple[SampledToken, ...] | None:
        """The drawn tokens that equal the drafts, up to the first that does not, and that one.

        `drawn`: the token of each draw, None where there is none. None when one of the accepted
        tokens could not be drawn.
        """
        n_equal = next(
            (i for i, draft in enumerate(self.drafts) if not _is(drawn[i], draft)),
            len(self.drafts),
        )
        found = [token for token in drawn[: n_equal + 1] if token is not None]
        return tuple(found) if len(found) == n_equal + 1 else None

    def accept(self, tokens: Sequence[SampledToken]) -> None:
        """The row continues after these tokens: the last of them is the next to compute."""
        for token in tokens:
            self.row.sampling.accept(token.token_id)
        self.row.rewind(self.n - len(tokens))


@dataclass(slots=True)
class StepDraws:
    """All draws of a step, in the order of the rows, and the logits of each: `[draws, vocab]`, in
    several arrays.
    """

    rows: list[RowDraws] = field(default_factory=list)
    _logits: list[mx.array] = field(default_factory=list)

    def add(self, rows: Sequence[RowDraws], logits: mx.array) -> None:
        self.rows += rows
        self._logits.append(logits)

    def keep(self, late: Collection[SequenceId]) -> list[mx.array]:
        """Rows whose masks are late do not sample in this step: they keep the logits after their
        last own token. Returns these logits, to be evaluated.
        """
        kept = [(one, own) for one, own in self._ranges() if one.row.sequence_id in late]
        if not kept:
            return []
        logits = self.logits()
        found = [mx.contiguous(logits[own.start : own.start + 1]) for _, own in kept]
        for (one, _), its_logits in zip(kept, found, strict=True):
            one.truncate(1).row.logits = its_logits
        self._reduce([pair for pair in self._ranges() if pair[0].row.sequence_id not in late])
        return found

    def limit(self, masks: StepMasks) -> None:
        """A row with masks draws as often as it has masks."""
        n_masks = Counter(masks.sequence_ids)
        counts = [n_masks.get(one.row.sequence_id, one.n) for one in self.rows]
        pairs = zip(self._ranges(), counts, strict=True)
        self._reduce([(one.truncate(n), own[:n]) for (one, own), n in pairs])

    def logits(self) -> mx.array:
        """The logits of all draws."""
        return self._logits[0] if len(self._logits) == 1 else mx.concatenate(self._logits)

    def drop_logits(self) -> None:
        """Release the logits, which have been read."""
        self._logits.clear()

    def states(self) -> list[SamplingRow]:
        """The sampling states of all draws."""
        return [state for one in self.rows for state in one.states()]

    def masked(self, masks: StepMasks) -> list[int]:
        """The index of the draw that each mask is for."""
        draws = {one.row.sequence_id: iter(own) for one, own in self._ranges()}
        return [next(draws[sequence_id]) for sequence_id in masks.sequence_ids]

    def firsts(self) -> list[int]:
        """The index of each row's first draw."""
        return [own.start for own in self.ranges()]

    def accepted_tokens(
        self, drawn: Sequence[SampledToken | None]
    ) -> Iterator[tuple[RowDraws, tuple[SampledToken, ...] | None]]:
        """The accepted tokens of each row; see `RowDraws`. `drawn`: the token of each draw."""
        for one, own in self._ranges():
            yield one, one.accepted_tokens(drawn[own.start : own.stop])

    def ranges(self) -> list[range]:
        """The indices of each row's draws among all draws."""
        bounds = accumulate((one.n for one in self.rows), initial=0)
        return [range(first, stop) for first, stop in pairwise(bounds)]

    def _ranges(self) -> list[tuple[RowDraws, range]]:
        return list(zip(self.rows, self.ranges(), strict=True))

    def _reduce(self, stay: Sequence[tuple[RowDraws, range]]) -> None:
        """`stay`: the rows that are left, and the indices of their draws among the present ones."""
        indices = [index for _, own in stay for index in own]
        self._logits = [rows_of(self.logits(), indices)] if indices else []
        self.rows = [one for one, _ in stay]


def rows_of(array: mx.array, rows: Sequence[int]) -> mx.array:
    """Some rows of an array, in order: the array itself where these are all."""
    return array if len(rows) == len(array) else array[mx.array(list(rows))]


def _is(token: SampledToken | None, draft: int) -> bool:
    return token is not None and token.token_id == draft


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


class GivenUp(NamedTuple):
    """What has failed on the device, and computes no more steps."""

    attention: bool  # the one that was chosen, in place of `gather`
    compiled: bool  # all compiled functions


@dataclass(slots=True)
class SubmittedStep:
    """A step that has been submitted and not collected. Once `awaited` has been evaluated, all of
    it is computed.

    `given_up`: what had failed before. `is_lost`: it was in flight when the storage was lost.
    `not_encoded`: the images that could not be encoded, by digest, each with the reason. `finite`:
    whether the features of images are numbers, of those whose last stage is in the step.
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
    not_encoded: dict[bytes, str] = field(default_factory=dict)
    finite: dict[bytes, mx.array] = field(default_factory=dict)

    def pending(
        self, arrays: list[mx.array], first_layer: Sequence[mx.array] = ()
    ) -> PendingForward:
        """A forward of this step, to be launched."""
        self.awaited += arrays
        read, self.read = self.read, []
        return PendingForward(arrays, list(first_layer), read)

    def check_images(self) -> list[bytes]:
        """Add the images whose features are not numbers to `not_encoded`. Returns their digests."""
        found = [digest for digest, finite in self.finite.items() if not finite.item()]
        self.not_encoded |= dict.fromkeys(found, NOT_FINITE)
        return found

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

        return tuple(result(row) for row in self.rows)


def _scores_of(parts: Sequence[Scored]) -> tuple[TokenLogprob, ...] | None:
    """The scores of a row's tokens; None where any of its logits are no distribution."""
    scores = list[TokenLogprob]()
    for part in parts:
        if (part_scores := part.read()) is None:
            return None
        scores += part_scores
    return tuple(scores)
