"""The model runner: a step's ops, prompt chunks, decodes and samples on the device."""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from engine.mlx_backend.batch import Batch, Seat, StepTokens
from engine.mlx_backend.launch import Laid, Launch
from engine.mlx_backend.model.cached_model import CachedModel
from engine.mlx_backend.model.forward_batch import ForwardBatch, Run
from engine.mlx_backend.sampling.sampler import Drawn, Sampler, Scored
from engine.mlx_backend.storage.reading import NO_READING, Reading
from engine.step.plan import Chunk, SampledToken, SequenceId, StepMasks, StepPlan, StepResult
from engine.step.runner import RunnerLost
from engine.types.output import TokenLogprob

SCORED_TOKENS = 128
"""Prompt tokens scored in one forward: bounds the logits, `[tokens, vocabulary]`, in memory."""

UNUSABLE = "the model's logits leave no token to choose: not a number, or all ruled out"


@dataclass(slots=True)
class _Flight:
    """A step that has been submitted.

    `rest` is what of it has not been launched. `logits` are those of the rows that sample, `[rows,
    vocab]`, piecewise; `ends` are known when all is computed.
    """

    rest: Iterator[Laid] = field(default_factory=lambda: iter(()))
    sampling: list[Seat] = field(default_factory=list)
    logits: list[mx.array] = field(default_factory=list)
    scored: dict[SequenceId, list[Scored]] = field(default_factory=dict)
    ends: list[mx.array] = field(default_factory=list)
    reading: Reading = NO_READING
    drawn: Drawn | None = None

    def laid(self, arrays: list[mx.array], beginning: Sequence[mx.array] = ()) -> Laid:
        """Of this step, to be launched."""
        self.ends += arrays
        return Laid(arrays, list(beginning))


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
            flight = _Flight()
            flight.rest = self._launch.begin(self._lay_out(flight, plan))
            self._flights.append(flight)
        except Exception:
            self._settle()
            raise

    def sample(self, masks: Callable[[], StepMasks]) -> None:
        """See `ModelRunner.sample`."""
        flight = self._flights[-1]
        try:
            self._launch.finish(flight.rest)
            ruled_out = masks()
            self._keep(flight, ruled_out.late)
            if flight.sampling:
                self._draw(flight, ruled_out)
        except Exception:
            self._flights.pop()
            self._settle()
            raise

    def collect(self) -> StepResult:
        """See `ModelRunner.collect`."""
        flight = self._flights.popleft()
        try:
            mx.eval(flight.ends)
            return _result(flight)
        except Exception:
            self._flights.clear()
            self._settle()
            raise

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

    def _lay_out(self, flight: _Flight, plan: StepPlan) -> Iterator[Laid]:
        """All forwards, each to be launched before the next is asked for."""
        self._storage.execute(plan.before)
        self._storage.states.begin_step()
        step = self._batch.lay_out(plan)
        forwards = self._model.arrange(step.runs)
        for batch in forwards.prompts:
            yield self._fill(flight, step, batch)
        for chunk, run in step.scored:
            yield from self._score(flight, step, chunk, run)
        self._storage.execute(plan.after_chunks)
        for batch in forwards.sampling:
            yield self._compute(flight, step, batch)
        for seat, logits in self._batch.kept(plan.kept):
            flight.logits.append(logits)
            flight.sampling.append(seat)
        self._storage.execute(plan.after)
        if saved := self._storage.states.unevaluated():
            yield flight.laid(saved)
        self._read(flight, plan)

    def _fill(self, flight: _Flight, step: StepTokens, batch: ForwardBatch) -> Laid:
        """A forward that nobody reads. Logits that are kept would keep the pools it has written."""
        computed = self._model.forward(batch, step.token_ids)
        return flight.laid(computed.witnesses, computed.beginning)

    def _compute(self, flight: _Flight, step: StepTokens, batch: ForwardBatch) -> Laid:
        """A forward from which tokens are sampled."""
        computed = self._model.forward(batch, step.token_ids)
        flight.logits.append(computed.logits)
        flight.sampling += [step.seats[run.index] for run in batch.runs if run.n_read]
        return flight.laid([computed.logits, *computed.witnesses], computed.beginning)

    def _score(self, flight: _Flight, step: StepTokens, chunk: Chunk, run: Run) -> Iterator[Laid]:
        """Score what follows each token."""
        flight.scored[chunk.sequence_id] = []
        for first, part in run.pieces(SCORED_TOKENS):
            following = chunk.next_tokens[first : first + part.piece.n_tokens]
            yield self._score_piece(flight, step, chunk, part, following)

    def _score_piece(
        self, flight: _Flight, step: StepTokens, chunk: Chunk, run: Run, following: Sequence[int]
    ) -> Laid:
        """`following` are the tokens whose scores are asked for, from the piece's first on."""
        computed = self._model.forward(ForwardBatch(((run,),)), step.token_ids)
        arrays = computed.witnesses
        if following:
            logits = computed.logits[: len(following)]
            scored = self._sampler.score(logits, following, chunk.prompt_logprobs or 0)
            flight.scored[chunk.sequence_id].append(scored)
            arrays = arrays + scored.arrays()
        return flight.laid(arrays, computed.beginning)

    def _read(self, flight: _Flight, plan: StepPlan) -> None:
        """Behind the forwards at once, on GPUs as well: nothing is written, so nothing copied."""
        if not plan.reads:
            return
        flight.reading = self._storage.read(plan.reads)
        mx.async_eval(flight.reading.arrays())
        flight.ends += flight.reading.arrays()

    def _keep(self, flight: _Flight, late: Collection[SequenceId]) -> None:
        """Rows that sit the step out keep their logits until they are sampled."""
        if not late:
            return
        together = _together(flight.logits)
        for row, seat in enumerate(flight.sampling):
            if seat.sequence_id in late:
                seat.logits = mx.contiguous(together[row : row + 1])
                flight.ends.append(seat.logits)
        stay = [row for row, seat in enumerate(flight.sampling) if seat.sequence_id not in late]
        flight.sampling = [flight.sampling[row] for row in stay]
        flight.logits = [together[mx.array(stay)]] if stay else []

    def _draw(self, flight: _Flight, masks: StepMasks) -> None:
        together = _together(flight.logits)
        rows = {seat.sequence_id: row for row, seat in enumerate(flight.sampling)}
        masked = [rows[sequence_id] for sequence_id in masks.sequence_ids]
        states = [seat.sampling for seat in flight.sampling]
        drawn = flight.drawn = self._sampler.sample(together, states, masks.masks, masked)
        self._batch.set_next_tokens(flight.sampling, drawn.tokens)
        mx.async_eval(drawn.arrays())
        flight.ends += drawn.arrays()
        flight.logits = []


def _together(logits: list[mx.array]) -> mx.array:
    return logits[0] if len(logits) == 1 else mx.concatenate(logits)


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
