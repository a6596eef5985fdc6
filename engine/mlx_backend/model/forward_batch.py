"""What runs in one forward of the model: runs of tokens, and in which shape they are laid out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.mlx_backend.model.forward import Piece

Indices = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive tokens of one sequence in a step.

    `index`: which of the step's runs it is, or is a part of. `first_token`: where its ids begin
    among the step's. `n_read`: of how many of its last tokens somebody reads the logits.
    """

    piece: Piece
    index: int
    first_token: int
    n_read: int = 0

    def pieces(self, n_tokens: int) -> Iterator[tuple[int, "Run"]]:
        """The run in pieces of so many tokens, and how far into it each begins. All are read."""
        for ahead in range(0, self.piece.n_tokens, n_tokens):
            n = min(n_tokens, self.piece.n_tokens - ahead)
            yield ahead, self._part(ahead, n, n)

    def without_last(self) -> "Run":
        """What comes before its last token. Nobody reads the logits."""
        return self._part(0, self.piece.n_tokens - 1, 0)

    def last(self) -> "Run":
        """Its last token."""
        return self._part(self.piece.n_tokens - 1, 1, 1)

    def _part(self, ahead: int, n_tokens: int, n_read: int) -> "Run":
        piece = replace(self.piece, start=self.piece.start + ahead, n_tokens=n_tokens)
        return Run(piece, self.index, self.first_token + ahead, n_read)


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The runs of one forward, in parts that attend each by itself.

    One part is laid out as `[rows, length]`, padded on the right. Several, whose runs are not
    padded, lie one behind the other as `[tokens, 1]`: each token is a row. So all that a model does
    for every token by itself is done once for all parts: weights are read once.
    """

    parts: tuple[tuple[Run, ...], ...]

    @property
    def runs(self) -> Iterator[Run]:
        """In the order in which they are laid out."""
        return (run for part in self.parts for run in part)

    @property
    def pieces(self) -> list[list[Piece]]:
        """Of each part."""
        return [[run.piece for run in part] for part in self.parts]

    @property
    def is_read(self) -> bool:
        """Whether somebody reads logits."""
        return any(run.n_read for run in self.runs)

    @property
    def unread(self) -> frozenset[int]:
        """The parts of which nobody reads logits."""
        return frozenset(
            index for index, part in enumerate(self.parts) if not any(run.n_read for run in part)
        )

    def token_indices(self) -> Indices:
        """Where each token's id stands among the step's, in the shape of the forward."""
        grids = [_token_grid(part) for part in self.parts]
        if len(grids) == 1:
            return grids[0]
        return np.concatenate([grid.ravel() for grid in grids])[:, None]

    def read_indices(self) -> Indices:
        """Which tokens' logits are read, counted over the forward's shape, run after run."""
        found, base = list[npt.NDArray[np.int32]](), 0
        for part in self.parts:
            length = _length(part)
            for run in part:
                stop = base + run.piece.n_tokens
                found.append(np.arange(stop - run.n_read, stop, dtype=np.int32))
                base += length
        return np.concatenate(found)


class StepForwards(NamedTuple):
    """A step's forwards: first those of which nobody reads the logits."""

    prompts: list[ForwardBatch]
    sampling: list[ForwardBatch]


def _length(part: Sequence[Run]) -> int:
    return max(run.piece.n_tokens for run in part)


def _token_grid(part: Sequence[Run]) -> Indices:
    """`[rows, length]`; what is padded repeats the row's last token."""
    counts = np.array([run.piece.n_tokens for run in part], dtype=np.int32)
    firsts = np.array([run.first_token for run in part], dtype=np.int32)
    within = np.arange(counts.max(), dtype=np.int32)
    return firsts[:, None] + np.minimum(within, counts[:, None] - 1)
