"""The model runner: a step's orders, prompt chunks, decodes and samples on the device."""

from collections import deque
from dataclasses import dataclass, field

import mlx.core as mx

from engine.mlx_backend.batch import Batch, Seat, StepTokens
from engine.mlx_backend.launch import Launch
from engine.mlx_backend.model.cached_model import CachedModel
from engine.mlx_backend.model.forward_batch import ForwardBatch, Run
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

    Belongs to the thread that made it, as all MLX arrays do.
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
        step = self._batch.lay_out(plan)
        forwards = self._model.arrange(step.runs)
        for batch in forwards.prompts:
            self._begin_computing(flight, self._model.forward(batch, step.token_ids).witnesses)
        for chunk, run in step.scored:
            self._score(flight, step, chunk, run)
        self._storage.carry_out(plan.between)
        for batch in forwards.sampling:
            self._compute(flight, step, batch)
        self._storage.carry_out(plan.after)
        if saved := self._storage.states.unevaluated():
            self._begin_computing(flight, saved)
        self._read(flight, plan)
        return flight

    def _compute(self, flight: _Flight, step: StepTokens, batch: ForwardBatch) -> None:
        """A forward from which tokens are sampled."""
        computed = self._model.forward(batch, step.token_ids)
        flight.logits.append(computed.logits)
        self._begin_computing(flight, [computed.logits, *computed.witnesses])
        flight.sampling += [step.seats[run.index] for run in batch.runs if run.n_read]

    def _score(self, flight: _Flight, step: StepTokens, chunk: Chunk, run: Run) -> None:
        """Score what follows each token."""
        scored = flight.scored[chunk.sequence_id] = []
        for first, part in run.pieces(SCORED_TOKENS):
            computed = self._model.forward(ForwardBatch(((part,),)), step.token_ids)
            following = chunk.next_tokens[first : first + part.piece.n_tokens]
            arrays = computed.witnesses
            if following:
                top = chunk.prompt_logprobs or 0
                logits = computed.logits[: len(following)]
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
