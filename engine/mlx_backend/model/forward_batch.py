"""Which spans of tokens run in one forward of the model, and in which shape."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.mlx_backend.model.forward import TokenSpan

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
