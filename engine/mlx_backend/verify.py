"""What a step draws for each row: one token, and one after each draft token that it verifies."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import mlx.core as mx

from engine.core.step import SampledToken, SequenceId, StepMasks
from engine.mlx_backend.batch import BatchRow
from engine.mlx_backend.sampling.edits import SamplingRow


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
