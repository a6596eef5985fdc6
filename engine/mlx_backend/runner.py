"""The model runner: a step's ops, prompt chunks, decodes and samples on the device."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from engine.core.step import (
    Chunk,
    RunnerLost,
    SampledToken,
    SequenceId,
    StepMasks,
    StepPlan,
    StepResult,
    Vector,
)
from engine.mlx_backend.batch import Batch, StepInputs
from engine.mlx_backend.launch import Launch, PendingForward
from engine.mlx_backend.model.cached_model import CachedModel
from engine.mlx_backend.model.forward import TokenSpan
from engine.mlx_backend.model.forward_batch import ForwardBatch
from engine.mlx_backend.pooling import HIDDEN_STATES, PendingVectors, Pooler
from engine.mlx_backend.row_draws import RowDraws, StepDraws, rows_of
from engine.mlx_backend.sampling.sampler import Drawn, Sampler, Scored
from engine.mlx_backend.storage.storage import NO_READS, PendingReads
from engine.values.output import TokenLogprob

SCORED_TOKENS = 128
"""Prompt tokens scored in one forward: bounds the logits, `[tokens, vocabulary]`, in memory."""

UNUSABLE = "the model's logits leave no token to choose: not a number, or all ruled out"
NO_VECTOR = "the model's hidden states are no numbers"


@dataclass(slots=True)
class _SubmittedStep:
    """A step that has been submitted and not collected.

    `rest`: its forwards that have not been launched. Once `awaited` have been evaluated, all of the
    step is computed.
    """

    rest: Iterator[PendingForward] = field(default_factory=lambda: iter(()))
    draws: StepDraws = field(default_factory=StepDraws)
    scored: dict[SequenceId, list[Scored]] = field(default_factory=dict)
    pooled: list[PendingVectors] = field(default_factory=list)
    awaited: list[mx.array] = field(default_factory=list)
    reads: PendingReads = NO_READS
    drawn: Drawn | None = None

    def pending(
        self, arrays: list[mx.array], first_layer: Sequence[mx.array] = ()
    ) -> PendingForward:
        """A forward of this step, to be launched."""
        self.awaited += arrays
        return PendingForward(arrays, list(first_layer))


class MlxRunner:
    """Implements `ModelRunner` for an mlx-lm model over the engine's storage.

    Belongs to the thread that made it, as all MLX arrays do.
    """

    def __init__(
        self,
        model: CachedModel,
        sampler: Sampler,
        launch: Launch,
        pooler: Pooler = HIDDEN_STATES,
    ) -> None:
        self._model = model
        self._pooler = pooler
        self._storage = model.storage
        self._sampler = sampler
        self._launch = launch
        self._batch = Batch(model.n_groups)
        self._in_flight: deque[_SubmittedStep] = deque()

    def submit(self, plan: StepPlan) -> None:
        """See `ModelRunner.submit`."""
        self._batch.change(plan)
        try:
            self._wait_for_reads()
            step = _SubmittedStep()
            step.rest = self._launch.begin(self._build_forwards(step, plan))
            self._in_flight.append(step)
        except Exception:
            self._settle()
            raise

    def sample(self, masks: Callable[[], StepMasks]) -> None:
        """See `ModelRunner.sample`."""
        step = self._in_flight[-1]
        try:
            self._launch.finish(step.rest)
            ruled_out = masks()
            if kept := step.draws.keep(ruled_out.late):
                # Launched now: `collect` would launch it after the next step's forwards. It writes
                # no pool, so no write that follows copies one.
                mx.async_eval(kept)
                step.awaited += kept
            if step.draws.rows:
                self._draw(step, ruled_out)
        except Exception:
            self._in_flight.pop()
            self._settle()
            raise

    def collect(self) -> StepResult:
        """See `ModelRunner.collect`."""
        step = self._in_flight.popleft()
        try:
            mx.eval(step.awaited)
            result = _result(step)
            self._go_on(step, result)
            return result
        except Exception:
            self._in_flight.clear()
            self._settle()
            raise

    def _settle(self) -> None:
        """After a failure. Raises RunnerLost when what the storage holds cannot be computed."""
        try:
            mx.eval(self._storage.arrays())
        except Exception as error:
            raise RunnerLost(f"the KV cache cannot be computed: {error}") from error

    def _wait_for_reads(self) -> None:
        """Reads that are not computed refer to the arenas' arrays, and a write would copy these."""
        if any(step.reads.arrays() for step in self._in_flight):
            mx.synchronize()

    def _build_forwards(self, step: _SubmittedStep, plan: StepPlan) -> Iterator[PendingForward]:
        """All forwards of the step, each to be launched before the next is built."""
        self._storage.execute(plan.before)
        self._storage.states.begin_step()
        inputs = self._batch.prepare_inputs(plan)
        forwards = self._model.arrange(inputs.spans)
        for batch in forwards.prompts:
            yield self._prefill(step, inputs, batch)
        for chunk, span in inputs.scored:
            yield from self._score(step, inputs, chunk, span)
        for chunk, span in inputs.gathered:
            yield self._pool(step, inputs, chunk, span)
        self._storage.execute(plan.after_chunks)
        for batch in forwards.sampling:
            yield self._compute(step, inputs, batch)
        for row, logits in self._batch.take_kept(plan.kept):
            step.draws.add([RowDraws(row)], logits)
        self._storage.execute(plan.after)
        if saved := self._storage.states.unevaluated():
            yield step.pending(saved)
        self._read(step, plan)

    def _prefill(
        self, step: _SubmittedStep, inputs: StepInputs, batch: ForwardBatch
    ) -> PendingForward:
        """A forward whose logits are not read. To keep them would keep the pools it has written."""
        computed = self._model.forward(batch, inputs.token_ids)
        return step.pending(computed.fences, computed.first_layer)

    def _compute(
        self, step: _SubmittedStep, inputs: StepInputs, batch: ForwardBatch
    ) -> PendingForward:
        """A forward from which tokens are sampled, or whose last tokens are pooled."""
        computed = self._model.forward(batch, inputs.token_ids)
        read = [index for span in batch.spans for index in [span.index] * span.n_read]
        sampled = [at for at, index in enumerate(read) if index not in inputs.pooled]
        pooled = [at for at, index in enumerate(read) if index in inputs.pooled]
        arrays = list(computed.fences)
        if pooled:
            ids = [inputs.rows[read[at]].sequence_id for at in pooled]
            step.pooled.append(self._pooler.rows(computed, pooled, ids))
            arrays.append(step.pooled[-1].vectors)
        if sampled:
            rows = [
                RowDraws(inputs.rows[index], inputs.drafts.get(index, ()))
                for index in dict.fromkeys(read[at] for at in sampled)
            ]
            arrays.append(rows_of(computed.logits, sampled))
            step.draws.add(rows, arrays[-1])
        return step.pending(arrays, computed.first_layer)

    def _pool(
        self, step: _SubmittedStep, inputs: StepInputs, chunk: Chunk, span: TokenSpan
    ) -> PendingForward:
        """A forward whose tokens are pooled, the first or all."""
        computed = self._model.forward(ForwardBatch(((span,),)), inputs.token_ids)
        pooled = self._pooler.chunk(computed, chunk.pooling, chunk.sequence_id)
        step.pooled.append(pooled)
        return step.pending([pooled.vectors, *computed.fences], computed.first_layer)

    def _score(
        self, step: _SubmittedStep, inputs: StepInputs, chunk: Chunk, span: TokenSpan
    ) -> Iterator[PendingForward]:
        """Forwards that score the token after each of a chunk's, so many at a time."""
        step.scored[chunk.sequence_id] = []
        for first, part in span.split(SCORED_TOKENS):
            following = chunk.next_tokens[first : first + part.n_tokens]
            yield self._score_part(step, inputs, chunk, part, following)

    def _score_part(
        self,
        step: _SubmittedStep,
        inputs: StepInputs,
        chunk: Chunk,
        span: TokenSpan,
        following: Sequence[int],
    ) -> PendingForward:
        """`following`: the tokens to score, from the one after the span's first on."""
        computed = self._model.forward(ForwardBatch(((span,),)), inputs.token_ids)
        arrays = computed.fences
        if following:
            logits = computed.logits[: len(following)]
            scored = self._sampler.score(logits, following, chunk.prompt_logprobs or 0)
            step.scored[chunk.sequence_id].append(scored)
            arrays = arrays + scored.arrays()
        return step.pending(arrays, computed.first_layer)

    def _read(self, step: _SubmittedStep, plan: StepPlan) -> None:
        """Launched behind the forwards, on GPUs too: it writes nothing, so nothing is copied."""
        if not plan.reads:
            return
        step.reads = self._storage.read(plan.reads)
        mx.async_eval(step.reads.arrays())
        step.awaited += step.reads.arrays()

    def _draw(self, step: _SubmittedStep, masks: StepMasks) -> None:
        draws = step.draws
        draws.limit(masks)
        drawn = step.drawn = self._sampler.sample(
            draws.logits(), draws.states(), masks.masks, draws.masked(masks)
        )
        rows = [one.row for one in draws.rows]
        self._batch.set_next_tokens(rows, rows_of(drawn.tokens, draws.firsts()))
        mx.async_eval(drawn.arrays())
        step.awaited += drawn.arrays()
        draws.drop_logits()

    def _go_on(self, step: _SubmittedStep, result: StepResult) -> None:
        """Rows with drafts go on behind what counts: only now is that known."""
        rows = [
            one.row
            for one in step.draws.rows
            if one.drafts and one.row.sequence_id in result.sampled
        ]
        if rows:
            lasts = [result.sampled[row.sequence_id][-1].token_id for row in rows]
            self._batch.set_next_tokens(rows, mx.array(lasts, dtype=mx.uint32))


def _result(step: _SubmittedStep) -> StepResult:
    sampled: dict[SequenceId, tuple[SampledToken, ...]] = {}
    scored: dict[SequenceId, tuple[TokenLogprob, ...]] = {}
    failed: dict[SequenceId, str] = {}
    for sequence_id, parts in step.scored.items():
        reports = [part.read() for part in parts]
        usable = [report for report in reports if report is not None]
        if len(usable) < len(reports):
            failed[sequence_id] = UNUSABLE
        scored[sequence_id] = tuple(score for report in usable for score in report)
    pooled = dict[SequenceId, Vector](one for part in step.pooled for one in part.read())
    failed |= {id: NO_VECTOR for id, vector in pooled.items() if not np.isfinite(vector).all()}
    tokens = step.drawn.read() if step.drawn is not None else []
    for one, counted in step.draws.counted(tokens):
        if counted is None:
            failed[one.row.sequence_id] = UNUSABLE
        else:
            one.accept(counted)
            sampled[one.row.sequence_id] = counted
    return StepResult(sampled, scored, failed, step.reads.parts(), pooled)
