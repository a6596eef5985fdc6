"""What the runner keeps of each sequence from one step to the next."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from engine.mlx_backend.model.forward import Piece
from engine.mlx_backend.model.forward_batch import Run
from engine.mlx_backend.sampling.row import SamplingRow
from engine.mlx_backend.storage.tables import SequenceTables
from engine.step.plan import Chunk, SequenceId, StepPlan

_LEAST_SEATS = 8


@dataclass(eq=False, slots=True)
class Seat:
    """One sequence. `index` is its place in the batch's arrays on the device."""

    sequence_id: SequenceId
    index: int
    tables: SequenceTables
    sampling: SamplingRow
    position: int = 0  # of the next token to compute
    logits: mx.array | None = None  # [1, vocab], computed, of a token that is not sampled yet

    def piece(self, n_tokens: int) -> Piece:
        """The next tokens, which are computed with this."""
        piece = self.tables.piece(self.position, n_tokens)
        self.position += n_tokens
        return piece


@dataclass(slots=True)
class StepTokens:
    """What a step computes. `token_ids`: of its prompts, then of all seats.

    `scored` are runs of which every token's logits are read, each in forwards of its own.
    """

    token_ids: mx.array
    runs: list[Run] = field(default_factory=list)
    seats: list[Seat] = field(default_factory=list)  # by a run's index
    scored: list[tuple[Chunk, Run]] = field(default_factory=list)

    def add(self, seat: Seat, n_tokens: int, first_token: int, n_read: int) -> None:
        self.runs.append(Run(seat.piece(n_tokens), len(self.seats), first_token, n_read))
        self.seats.append(seat)

    def add_chunk(self, seat: Seat, chunk: Chunk, first_token: int) -> None:
        n_read = int(chunk.samples)
        if chunk.prompt_logprobs is None:
            self.add(seat, len(chunk.tokens), first_token, n_read)
            return
        n_scored = len(chunk.tokens) - n_read
        if n_scored:
            run = Run(seat.piece(n_scored), -1, first_token, n_scored)
            self.scored.append((chunk, run))
        if n_read:
            self.add(seat, 1, first_token + n_scored, n_read)


class Batch:
    """The sequences that have entered and not left, and the next token of each on the device."""

    def __init__(self, n_groups: int) -> None:
        self._n_groups = n_groups
        self._seats: dict[SequenceId, Seat] = {}
        self._free: list[int] = []
        self._tokens = mx.zeros(0, dtype=mx.int32)  # by seat: the token to compute next

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

    def lay_out(self, plan: StepPlan) -> StepTokens:
        """The tokens of a step, and where they belong. Moves the positions on."""
        prompts = [token for chunk in plan.chunks for token in chunk.tokens]
        step = StepTokens(self._behind(prompts))
        first = 0
        for chunk in plan.chunks:
            seat = self._seats[chunk.sequence_id]
            seat.position = chunk.start
            step.add_chunk(seat, chunk, first)
            first += len(chunk.tokens)
        for sequence_id in plan.decodes:
            seat = self._seats[sequence_id]
            step.add(seat, 1, len(prompts) + seat.index, n_read=1)
        return step

    def kept(self, sequence_ids: Sequence[SequenceId]) -> Iterator[tuple[Seat, mx.array]]:
        """The logits that these have kept. They keep them no more."""
        for sequence_id in sequence_ids:
            seat = self._seats[sequence_id]
            logits, seat.logits = seat.logits, None
            assert logits is not None, "a step was sat out by who was not in it"
            yield seat, logits

    def set_next_tokens(self, seats: Sequence[Seat], tokens: mx.array) -> None:
        """What each decodes next; `tokens`: `[rows]`, perhaps still to be computed."""
        self._tokens[mx.array([seat.index for seat in seats])] = tokens

    def _behind(self, prompts: list[int]) -> mx.array:
        if not prompts:
            return self._tokens
        return mx.concatenate([mx.array(prompts, dtype=mx.int32), self._tokens])

    def _take_index(self) -> int:
        if not self._free:
            first = self._tokens.size
            room = max(first, _LEAST_SEATS)
            self._tokens = mx.concatenate([self._tokens, mx.zeros(room, dtype=mx.int32)])
            self._free = list(reversed(range(first, first + room)))
        return self._free.pop()
