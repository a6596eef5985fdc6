"""What the runner keeps of each sequence from one step to the next."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from engine.mlx_backend.model.forward import Piece
from engine.mlx_backend.model.tables import SequenceTables
from engine.mlx_backend.sampling.row import SamplingRow
from engine.step import SequenceId, StepPlan

_LEAST_SEATS = 8


@dataclass(eq=False, slots=True)
class Seat:
    """One sequence. `index` is its place in the batch's arrays on the device."""

    sequence_id: SequenceId
    index: int
    tables: SequenceTables
    sampling: SamplingRow
    position: int = 0  # of the next token to compute

    def piece(self, n_tokens: int) -> Piece:
        """The next tokens, which are computed with this."""
        piece = self.tables.piece(self.position, n_tokens)
        self.position += n_tokens
        return piece


class Batch:
    """The sequences that have entered and not left, and the next token of each on the device."""

    def __init__(self, n_groups: int) -> None:
        self._n_groups = n_groups
        self._seats: dict[SequenceId, Seat] = {}
        self._free: list[int] = []
        self._tokens = mx.zeros(0, dtype=mx.int32)  # by seat: the token to compute next

    def __getitem__(self, sequence_id: SequenceId) -> Seat:
        return self._seats[sequence_id]

    def change(self, plan: StepPlan) -> None:
        """Who leaves, who enters, and what changes in the tables."""
        for sequence_id in plan.leave:
            self._free.append(self._seats.pop(sequence_id).index)
        for entry in plan.enter:
            tables, sampling = SequenceTables(self._n_groups), SamplingRow(entry.sampling)
            self._seats[entry.sequence_id] = Seat(
                entry.sequence_id, self._take_index(), tables, sampling
            )
        for sequence_id, patch in plan.patches:
            self._seats[sequence_id].tables.patch(patch)

    def next_tokens(self, seats: Sequence[Seat]) -> mx.array:
        """The token that each computes next, `[rows]`."""
        return self._tokens[_indices(seats)]

    def set_next_tokens(self, seats: Sequence[Seat], tokens: mx.array) -> None:
        """`tokens`: `[rows]`, perhaps still to be computed."""
        self._tokens[_indices(seats)] = tokens

    def _take_index(self) -> int:
        if not self._free:
            first = self._tokens.size
            room = max(first, _LEAST_SEATS)
            self._tokens = mx.concatenate([self._tokens, mx.zeros(room, dtype=mx.int32)])
            self._free = list(reversed(range(first, first + room)))
        return self._free.pop()


def _indices(seats: Sequence[Seat]) -> mx.array:
    return mx.array([seat.index for seat in seats])
