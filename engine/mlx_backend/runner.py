"""The model runner: a step's orders, prompt chunks, decodes and samples on the device."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from engine.mlx_backend.batch import Batch, Seat
from engine.mlx_backend.launch import Launch
from engine.mlx_backend.model.cached_model import CachedModel
from engine.mlx_backend.model.forward import padded_tokens
from engine.mlx_backend.model.reading import NO_READING, Reading
from engine.mlx_backend.sampling.sampler import Drawn, Sampler, Scored
from engine.runner import RunnerLost
from engine.step import Chunk, SampledToken, SequenceId, StepMasks, StepPlan, StepResult
from engine.types import TokenLogprob

SCORED_TOKENS = 128
"""Prompt tokens scored in one forward: bounds the logits, `[tokens, vocabulary]`, in memory."""

UNUSABLE = "the model's logits leave no token to choose: not a number, or all ruled out"


@dataclass(slots=True)
class _Flight:
    """A step that has been submitted. `logits` are those of the rows that sample, `[rows, vocab]`,
    piecewise; `ends` are known when it has all been computed.
    """

    sampling: list[Seat] = field(default_factory=list)
    logits: list[mx.array] = field(default_factory=list)
    scored: dict[SequenceId, list[Scored]] = field(default_factory=dict)
    ends: list[mx.array] = field(default_factory=list)
    reading: Reading = NO_READING
    drawn: Drawn | None = None


class MlxRunner:
    """Implements `ModelRunner` for an mlx-lm model over the engine's storage.

    Belongs to the thread that made it, as all MLX arrays do. Logits are computed only where
    somebody reads them: every row that samples runs its last token in a forward of length 1.
    """

    def __init__(self, model: CachedModel, sampler: Sampler, launch: Launch) -> None:
        self._model = model
        self._storage = model.storage
        self._sampler = sampler
        self._launch = launch
        self._batch = Batch(model.n_groups)
        self._flights: deque[_Flight] = deque()

    def submit(self, plan: StepPlan) -> None:
        """See `ModelRunner.submit`."""
        self._batch.change(plan)
        try:
            self._wait_for_reads()
            self._flights.append(self._begin(plan))
        except Exception:
            self._settle()
            raise

    def sample(self, masks: StepMasks) -> None:
        """See `ModelRunner.sample`."""
        flight = self._flights[-1]
        if not flight.sampling:
            return
        try:
            self._draw(flight, masks)
        except Exception:
            self._flights.pop()
            self._settle()
            raise

    def collect(self) -> StepResult:
        """See `ModelRunner.collect`."""
        flight = self._flights.popleft()
        try:
            mx.eval(flight.ends)
        except Exception:
            self._flights.clear()
            self._settle()
            raise
        return _result(flight)

    def _settle(self) -> None:
        """After a failure: what was written may rest on what could not be computed."""
        try:
            mx.eval(self._storage.arrays())
        except Exception as error:
            raise RunnerLost(f"the KV cache cannot be computed: {error}") from error

    def _wait_for_reads(self) -> None:
        """What the step in flight reads refers to the arenas, and a write would copy them."""
        if any(flight.reading.arrays() for flight in self._flights):
            mx.synchronize()

    def _begin(self, plan: StepPlan) -> _Flight:
        """Launch all forwards."""
        flight = _Flight()
        self._storage.carry_out(plan.before)
        self._storage.states.begin_step()
        self._place(plan.chunks)
        self._compute_chunks(flight, [c for c in plan.chunks if c.prompt_logprobs is None])
        for chunk in plan.chunks:
            if chunk.prompt_logprobs is not None:
                self._score(flight, chunk)
        self._storage.carry_out(plan.between)
        self._decode(flight, [self._batch[sequence_id] for sequence_id in plan.sampling()])
        self._storage.carry_out(plan.after)
        if saved := self._storage.states.unevaluated():
            self._begin_computing(flight, saved)
        self._read(flight, plan)
        return flight

    def _place(self, chunks: Sequence[Chunk]) -> None:
        """Where each begins; the last token of those that sample is the next to be decoded."""
        for chunk in chunks:
            self._batch[chunk.sequence_id].position = chunk.start
        lasts = [chunk for chunk in chunks if chunk.samples]
        if lasts:
            tokens = mx.array([chunk.tokens[-1] for chunk in lasts])
            self._batch.set_next_tokens([self._batch[c.sequence_id] for c in lasts], tokens)

    def _compute_chunks(self, flight: _Flight, chunks: Sequence[Chunk]) -> None:
        runs = [(chunk.sequence_id, run) for chunk in chunks if (run := _run(chunk))]
        pieces = [self._batch[sequence_id].piece(len(run)) for sequence_id, run in runs]
        for group in self._model.groups(pieces):
            tokens = padded_tokens([runs[index][1] for index in group])
            computed = self._model.forward([pieces[index] for index in group], tokens)
            self._begin_computing(flight, computed.witnesses)  # nobody reads the logits

    def _decode(self, flight: _Flight, seats: Sequence[Seat]) -> None:
        """The next token of each; rows that share a prefix are neighbours."""
        if not seats:
            return
        seats = sorted(seats, key=lambda seat: seat.tables.blocks.tobytes())
        tokens = self._batch.next_tokens(seats)[:, None]
        pieces = [seat.piece(1) for seat in seats]
        for group in self._model.groups(pieces):
            rows = tokens if len(group) == len(seats) else tokens[mx.array(group)]
            computed = self._model.forward([pieces[index] for index in group], rows)
            flight.logits.append(computed.logits[:, -1])
            self._begin_computing(flight, flight.logits[-1:] + computed.witnesses)
            flight.sampling += [seats[index] for index in group]

    def _score(self, flight: _Flight, chunk: Chunk) -> None:
        """Score what follows each token."""
        seat, run = self._batch[chunk.sequence_id], _run(chunk)
        scored = flight.scored[chunk.sequence_id] = []
        for first in range(0, len(run), SCORED_TOKENS):
            tokens = run[first : first + SCORED_TOKENS]
            computed = self._model.forward([seat.piece(len(tokens))], padded_tokens([tokens]))
            following = chunk.next_tokens[first : first + SCORED_TOKENS]
            arrays = computed.witnesses
            if following:
                top = chunk.prompt_logprobs or 0
                logits = computed.logits[0, : len(following)]
                scored.append(self._sampler.score(logits, following, top))
                arrays = arrays + scored[-1].arrays()
            self._begin_computing(flight, arrays)

    def _read(self, flight: _Flight, plan: StepPlan) -> None:
        """Behind the forwards at once, on GPUs as well: nothing is written, so nothing copied."""
        if not plan.reads:
            return
        flight.reading = self._storage.read(plan.reads)
        mx.async_eval(flight.reading.arrays())
        flight.ends += flight.reading.arrays()

    def _begin_computing(self, flight: _Flight, arrays: list[mx.array]) -> None:
        self._launch(arrays)
        flight.ends += arrays

    def _draw(self, flight: _Flight, masks: StepMasks) -> None:
        logits = flight.logits
        together = logits[0] if len(logits) == 1 else mx.concatenate(logits)
        rows = {seat.sequence_id: row for row, seat in enumerate(flight.sampling)}
        masked = [rows[sequence_id] for sequence_id in masks.sequence_ids]
        states = [seat.sampling for seat in flight.sampling]
        drawn = flight.drawn = self._sampler.sample(together, states, masks.masks, masked)
        self._batch.set_next_tokens(flight.sampling, drawn.tokens)
        mx.async_eval(drawn.arrays())
        flight.ends += drawn.arrays()
        flight.logits = []


def _run(chunk: Chunk) -> tuple[int, ...]:
    """All its tokens, but for the last one where that is computed with the decodes."""
    return chunk.tokens[:-1] if chunk.samples else chunk.tokens


def _result(flight: _Flight) -> StepResult:
    sampled: dict[SequenceId, SampledToken] = {}
    scored: dict[SequenceId, tuple[TokenLogprob, ...]] = {}
    failed: dict[SequenceId, str] = {}
    for sequence_id, parts in flight.scored.items():
        reports = [part.read() for part in parts]
        usable = [report for report in reports if report is not None]
        if len(usable) < len(reports):
            failed[sequence_id] = UNUSABLE
        scored[sequence_id] = tuple(score for report in usable for score in report)
    tokens = flight.drawn.read() if flight.drawn is not None else []
    for seat, token in zip(flight.sampling, tokens, strict=True):
        if token is None:
            failed[seat.sequence_id] = UNUSABLE
        else:
            seat.sampling.accept(token.token_id)
            sampled[seat.sequence_id] = token
    return StepResult(sampled, scored, failed, flight.reading.parts())
