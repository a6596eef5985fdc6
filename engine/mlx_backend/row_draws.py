"""What a step samples of each row, and how much of that counts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from engine.mlx_backend.batch import BatchRow
from engine.mlx_backend.sampling.row import SamplingRow
from engine.step.plan import SampledToken


@dataclass(frozen=True, slots=True)
class RowDraws:
    """The draws of one row: one behind its last own token, and one behind each of its drafts.

    The row's position is behind the drafts until it is known which are right.
    """

    row: BatchRow
    drafts: tuple[int, ...] = ()

    @property
    def n(self) -> int:
        return 1 + len(self.drafts)

    def first(self, n: int) -> "RowDraws":
        """Its first `n` draws. The row goes on before the drafts behind which nothing is drawn."""
        self.row.take_back(self.n - n)
        return RowDraws(self.row, self.drafts[: n - 1])

    def states(self) -> Iterator[SamplingRow]:
        """The sampling state of each draw: as if all drafts before it were right."""
        state = self.row.sampling
        yield state
        for draft in self.drafts:
            state = state.followed_by(draft)
            yield state

    def counted(self, drawn: Sequence[SampledToken | None]) -> tuple[SampledToken, ...] | None:
        """The tokens that count: those that equal the drafts, and the next. None when one of them
        could not be drawn. `drawn`: the token of each draw, None where there is none.
        """
        n_right = next(
            (i for i, draft in enumerate(self.drafts) if not _is(drawn[i], draft)),
            len(self.drafts),
        )
        found = [token for token in drawn[: n_right + 1] if token is not None]
        return tuple(found) if len(found) == n_right + 1 else None

    def accept(self, counted: Sequence[SampledToken]) -> None:
        """The row goes on behind these: the last of them is the next to compute."""
        for token in counted:
            self.row.sampling.accept(token.token_id)
        self.row.take_back(self.n - len(counted))


def ranges(draws: Sequence[RowDraws]) -> list[range]:
    """Which of all draws, one row's behind another's, are each row's."""
    bounds = accumulate((one.n for one in draws), initial=0)
    return [range(first, stop) for first, stop in pairwise(bounds)]


def _is(token: SampledToken | None, draft: int) -> bool:
    return token is not None and token.token_id == draft
