"""The model runner: a step's ops, prompt chunks, decodes and samples on the device."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import chain

import mlx.core as mx
import numpy as np

from engine.core.step import (
    NOTHING_DRAFTED,
    DraftPlan,
    Failed,
    Late,
    Prefill,
    Prefilled,
    Row,
    RowResult,
    RunnerLost,
    Sampled,
    SampledToken,
    SequenceId,
    StepMasks,
    StepPlan,
    StepResult,
    Vector,
    Verified,
    Verify,
)
from engine.mlx_backend.batch import Batch, BatchRow, StepInputs
from engine.mlx_backend.decode.choice import DecodePath
from engine.mlx_backend.draft_runner import DraftRunner, SampledRow
from engine.mlx_backend.host import MemoryMeter
from engine.mlx_backend.kv.storage import PendingReads
from engine.mlx_backend.model.batching import ForwardBatch
from engine.mlx_backend.model.cached_model import HIDDEN_STATES, CachedModel, PendingVectors, Pooler
from engine.mlx_backend.model.rows import TokenSpan
from engine.mlx_backend.sampling.sampler import Drawn, Sampler, Scored
from engine.mlx_backend.verify import RowDraws, StepDraws, rows_of
from engine.values.output import TokenLogprob
from kvstore.ops import CopyBlock, FillBlock, When


@dataclass(frozen=True, slots=True)
class PendingForward:
    """A forward that has been built and not launched: the arrays to evaluate.

    `first_layer`: those of its first layer, which may be launched ahead of the others. `read`: of
    blocks that are copied before it; each list is computed before the next one is launched.
    """

    arrays: list[mx.array]
    first_layer: list[mx.array] = field(default_factory=list)
    read: list[list[mx.array]] = field(default_factory=list)


class Launch(Enum):
    """When a step's forwards are given to the device, each before the next is built."""

    AHEAD = auto()
    """While the step before is computed. For the CPU, where a task releases its inputs as soon as
    it has run, and a pool is written a whole forward after it was last read.

    MLX takes about fifty operations ahead of the CPU, and waits. With a whole forward it would wait
    until that is nearly computed, and the step before would be collected so much later. So only the
    first layer goes ahead, and of a compiled forward nothing: it takes the host too little time.
    """
    WHEN_IDLE = auto()
    """When all that is in flight has been computed. For Metal and CUDA, which keep the buffers of a
    command buffer or graph until it completes: a pool in one of them would be copied.
    """

    @classmethod
    def on(cls, device: mx.Device) -> "Launch":
        """The launch that serves on a device."""
        return cls.AHEAD if device == mx.cpu else cls.WHEN_IDLE

    def begin(self, forwards: Iterator[PendingForward]) -> Iterator[PendingForward]:
        """Launch enough to keep the device busy. Returns the forwards that are left."""
        if self is Launch.WHEN_IDLE:
            self.finish(forwards)
        elif (first := next(forwards, None)) is not None:
            for read in first.read:
                mx.eval(read)
            mx.async_eval(first.first_layer)
            return chain([PendingForward(first.arrays)], forwards)
        return forwards

    def defer(self, forwards: Iterator[PendingForward]) -> Iterator[PendingForward]:
        """Build what `begin` would, and launch nothing while something is in flight."""
        if self is Launch.WHEN_IDLE or (first := next(forwards, None)) is None:
            return forwards
        return chain([first], forwards)

    def finish(self, forwards: Iterator[PendingForward]) -> None:
        """Launch the forwards that are left. Returns while the device computes."""
        for forward in forwards:
            if self is Launch.WHEN_IDLE:
                mx.synchronize()
            for read in forward.read:
                mx.eval(read)
            mx.async_eval(forward.arrays)


SCORED_TOKENS = 128
"""Prompt tokens scored in one forward: bounds the logits, `[tokens, vocabulary]`, in memory."""

UNUSABLE = "the model's logits leave no token to choose: not a number, or all ruled out"
NO_VECTOR = "the model's hidden states are no numbers"


@dataclass(slots=True)
class _SubmittedStep:
    """A step that has been submitted and not collected. Once `awaited` has been evaluated, all of
    it is computed.
    """

    rows: Sequence[Row]
    late: frozenset[SequenceId] = frozenset()
    unlaunched: Iterator[PendingForward] = field(default_factory=lambda: iter(()))
    draws: StepDraws = field(default_factory=StepDraws)
    drawn: Drawn | None = None
    scored: dict[SequenceId, list[Scored]] = field(default_factory=dict)
    pooled: list[PendingVectors] = field(default_factory=list)
    reads: PendingReads | None = None
    awaited: list[mx.array] = field(default_factory=list)
    read: list[list[mx.array]] = field(default_factory=list)  # of copied blocks, for a forward
    is_compiled: bool = False
    draft: DraftPlan | None = None

    def pending(
        self, arrays: list[mx.array], first_layer: Sequence[mx.array] = ()
    ) -> PendingForward:
        """A forward of this step, to be launched."""
        self.awaited += arrays
        read, self.read = self.read, []
        return PendingForward(arrays, list(first_layer), read)


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
        decode: DecodePath | None = None,
        meter: MemoryMeter | None = None,
        draft: DraftRunner | None = None,
    ) -> None:
        """`decode`: how steady decodes are computed; None: eagerly. `meter` measures each step.
        `draft`: of a draft model, if there is one.
        """
        self._model = model
        self._storage = model.storage
        self._sampler = sampler
        self._launch = launch
        self._pooler = pooler
        self._decode_path = decode
        self._meter = meter
        self._draft_runner = draft
        if decode is not None:
            sampler.draw_with = decode.draw
        self._batch = Batch(model.n_groups)
        self._in_flight: deque[_SubmittedStep] = deque()

    def submit(self, plan: StepPlan) -> None:
        """See `ModelRunner.submit`."""
        if self._decode_path is not None:
            self._decode_path.steps += 1
        self._batch.change(plan)
        try:
            if not self._storage.has_room_for(plan):
                self._grow()
            step = _SubmittedStep(plan.rows, draft=plan.draft)
            forwards = self._build_forwards(step, plan)
            # Copies and fills write planes that what is in flight may still read, and so does each
            # step after one that reads for the disk: MLX would copy these planes.
            changes = (isinstance(op, CopyBlock | FillBlock) for op in plan.ops_at(When.FIRST))
            is_deferred = any(each.reads is not None for each in self._in_flight) or any(changes)
            with self._computing(step):
                if is_deferred and self._in_flight:
                    step.unlaunched = self._launch.defer(forwards)
                else:
                    step.unlaunched = self._launch.begin(forwards)
            self._in_flight.append(step)
        except Exception:
            self._settle()
            raise

    def launch(self) -> None:
        """See `ModelRunner.launch`."""
        step = self._in_flight[-1]
        with self._dropping_last(), self._computing(step):
            self._launch.finish(step.unlaunched)

    def draw(self, masks: StepMasks) -> None:
        """See `ModelRunner.draw`."""
        step = self._in_flight[-1]
        with self._dropping_last():
            step.late = frozenset(masks.late)
            if step.late and (saved := step.draws.keep(step.late)):
                # Launched now: `collect` would launch it after the next step's forwards. It writes
                # no pool, so no write that follows copies one.
                mx.async_eval(saved)
                step.awaited += saved
            if step.draws.rows:
                self._draw(step, masks)
            if self._decode_path is not None and self._decode_path.compiled is not None:
                self._decode_path.compiled.trace_ahead()

    def collect(self) -> StepResult:
        """See `ModelRunner.collect`."""
        step = self._in_flight.popleft()
        measuring = nullcontext() if self._meter is None else self._meter.step()
        try:
            with measuring, self._computing(step):
                mx.eval(step.awaited)
            accepted = _accept_tokens(step)
            self._set_tokens_after_verification(step, accepted)
            parts = () if step.reads is None else step.reads.parts()
            return StepResult(_row_results(step, accepted), parts, self._continue(step, accepted))
        except Exception:
            self._in_flight.clear()
            self._settle()
            raise

    @contextmanager
    def _dropping_last(self) -> Iterator[None]:
        """Within the context an error drops the step that was submitted last."""
        try:
            yield
        except Exception:
            self._in_flight.pop()
            self._settle()
            raise

    @contextmanager
    def _computing(self, step: _SubmittedStep) -> Iterator[None]:
        """Within the context the device is given the step's forwards. A compiled one that fails is
        the last, unless another attention may be better.
        """
        try:
            yield
        except Exception as error:
            attention = self._model.execution.attention
            if attention.fallback is not None and not _can_be_evaluated(step.awaited):
                attention.give_up(error)
            elif step.is_compiled and self._decode_path is not None:
                self._decode_path.give_up(error)
            raise

    def _settle(self) -> None:
        """After a failure. Raises RunnerLost when what the storage holds cannot be computed."""
        try:
            mx.eval(self._storage.arrays())
        except Exception as error:
            raise RunnerLost(f"the KV cache cannot be computed: {error}") from error

    def grow_ahead(self) -> None:
        """Let the arena grow if a step may soon need that: while the engine is idle nobody waits
        for it. Raises RunnerLost where that fails.
        """
        if self._storage.is_nearly_full():
            self._grow()

    def _grow(self) -> None:
        """Let the arena grow, and forget what was traced for its smaller planes. Raises RunnerLost
        where that fails: some layers may have grown.
        """
        mx.synchronize()
        try:
            self._storage.grow()
        except Exception as error:
            raise RunnerLost(f"the KV cache cannot grow: {error}") from error
        if self._decode_path is not None and self._decode_path.compiled is not None:
            self._decode_path.compiled.forget_traces()

    def _build_forwards(self, step: _SubmittedStep, plan: StepPlan) -> Iterator[PendingForward]:
        """All forwards of the step, each to be launched before the next is built."""
        try:
            step.read = self._storage.execute(plan.ops_at(When.FIRST))
        finally:  # or a later `RollBackState`, for this step, would undo the step before
            self._storage.states.begin_step()
        if (decoded := self._decode(step, plan)) is not None:
            yield decoded
        else:
            yield from self._build_eager_forwards(step, plan)
        if plan.ops and not step.awaited:  # no forward, which would write what they do
            yield step.pending(self._storage.fences())
        self._storage.execute(plan.ops_at(When.LAST))
        if saved := self._storage.states.unevaluated():
            yield step.pending(saved)
        if plan.reads:
            step.reads = self._storage.read(plan.reads)
            mx.async_eval(step.reads.arrays())
            step.awaited += step.reads.arrays()

    def _build_eager_forwards(
        self, step: _SubmittedStep, plan: StepPlan
    ) -> Iterator[PendingForward]:
        """The step's forwards without a compiled one, prompts before decodes."""
        inputs = self._batch.prepare_inputs(plan)
        forwards = self._model.arrange(inputs.spans)
        for batch in forwards.prompts:
            # Its logits are not read. To keep them would keep the pools that it has written.
            computed = self._model.forward(batch, inputs.token_ids)
            yield step.pending(computed.fences, computed.first_layer)
        for prefill, span in inputs.scored:
            yield from self._score(step, inputs.token_ids, prefill, span)
        for prefill, span in inputs.gathered:
            yield self._pool(step, inputs.token_ids, prefill, span)
        self._storage.execute(plan.ops_at(When.AFTER_PREFILLS))
        for batch in forwards.sampling:
            yield self._compute(step, inputs, batch)
        _add_resampled(step, inputs.resampled)

    def _decode(self, step: _SubmittedStep, plan: StepPlan) -> PendingForward | None:
        """The compiled forward of a steady step; None where the eager path is to compute it."""
        path = self._decode_path
        if path is None or path.compiled is None:
            return None
        found = self._batch.decoding_rows(plan)
        if found is None:
            return None
        rows, resampled = found
        logits = path.compiled.forward(rows, lambda lines: self._batch.next_tokens(rows, lines))
        if logits is None:
            return None
        step.is_compiled = True
        if resampled and len(logits) > len(rows):
            logits = logits[: len(rows)]  # else the sampler takes the padding, too
        step.draws.add([RowDraws(row) for row in rows], logits)
        _add_resampled(step, resampled)
        return step.pending([logits, *self._storage.states.unevaluated()])

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
        self, step: _SubmittedStep, token_ids: mx.array, prefill: Prefill, span: TokenSpan
    ) -> PendingForward:
        """A forward whose tokens are pooled, the first or all."""
        computed = self._model.forward(ForwardBatch(((span,),)), token_ids)
        pooled = self._pooler.chunk(computed, prefill.pooling, prefill.sequence_id)
        step.pooled.append(pooled)
        return step.pending([pooled.vectors, *computed.fences], computed.first_layer)

    def _score(
        self, step: _SubmittedStep, token_ids: mx.array, prefill: Prefill, span: TokenSpan
    ) -> Iterator[PendingForward]:
        """Forwards that score the token after each of a row's, SCORED_TOKENS at a time."""
        assert prefill.score is not None
        scores = step.scored[prefill.sequence_id] = []
        for first, part in span.split(SCORED_TOKENS):
            computed = self._model.forward(ForwardBatch(((part,),)), token_ids)
            arrays = list(computed.fences)
            if following := prefill.score.next_tokens[first : first + part.n_tokens]:
                logits = computed.logits[: len(following)]
                scores.append(self._sampler.score(logits, following, prefill.score.n_top))
                arrays += scores[-1].arrays()
            yield step.pending(arrays, computed.first_layer)

    def _draw(self, step: _SubmittedStep, masks: StepMasks) -> None:
        """Choose the step's tokens, and let the batch's rows decode them next."""
        draws = step.draws
        if masks.sequence_ids:
            draws.limit(masks)
        drawn = step.drawn = self._sampler.sample(
            draws.logits(), draws.states(), masks.masks, draws.masked(masks)
        )
        try:
            mx.async_eval(drawn.arrays())
        except Exception as error:
            if self._decode_path is not None:
                self._decode_path.give_up(error)
            raise
        step.awaited += drawn.arrays()
        # Only now: the batch would keep tokens that cannot be computed, and compute with them.
        rows = [one.row for one in draws.rows]
        has_drafts = any(one.drafts for one in draws.rows)
        tokens = rows_of(drawn.tokens, draws.firsts()) if has_drafts else drawn.tokens
        self._batch.set_next_tokens(rows, tokens)
        draws.drop_logits()

    def _continue(
        self, step: _SubmittedStep, accepted: "_AcceptedTokens"
    ) -> Mapping[SequenceId, tuple[int, ...]] | None:
        """The draft model's tokens after those that the step has sampled; see `StepResult`."""
        if step.draft is None or self._draft_runner is None:
            return NOTHING_DRAFTED
        sampled = {
            one.row.sequence_id: SampledRow(accepted[one.row.sequence_id], one.row.sampling)
            for one in step.draws.rows
        }
        return self._draft_runner.draft(
            step.draft, sampled, lambda forwards: self._launch.finish(map(PendingForward, forwards))
        )

    def _set_tokens_after_verification(
        self, step: _SubmittedStep, accepted: "_AcceptedTokens"
    ) -> None:
        """Rows with drafts continue after the accepted tokens, which only now are known."""
        rows = [one.row for one in step.draws.rows if one.drafts and accepted[one.row.sequence_id]]
        if rows:
            lasts = [accepted[row.sequence_id][-1].token_id for row in rows]
            self._batch.set_next_tokens(rows, mx.array(lasts, dtype=mx.uint32))


def _add_resampled(step: _SubmittedStep, rows: Sequence[BatchRow]) -> None:
    """Let the step draw for rows from the logits that an earlier step has saved."""
    for row in rows:
        step.draws.add([RowDraws(row)], row.take_saved_logits())


_AcceptedTokens = Mapping[SequenceId, Sequence[SampledToken]]
"""Of each row that was drawn; no tokens where one of them could not be drawn."""


def _accept_tokens(step: _SubmittedStep) -> _AcceptedTokens:
    """Read the step's draws, and move its rows to after the accepted tokens."""
    found: dict[SequenceId, Sequence[SampledToken]] = {}
    tokens = step.drawn.read() if step.drawn is not None else []
    for one, accepted in step.draws.accepted_tokens(tokens):
        if accepted is not None:
            one.accept(accepted)
        found[one.row.sequence_id] = accepted or ()
    return found


def _can_be_evaluated(arrays: list[mx.array]) -> bool:
    """Whether the device computes these arrays."""
    try:
        mx.eval(arrays)
    except Exception:  # MLX may raise anything
        return False
    return True


def _row_results(step: _SubmittedStep, accepted: _AcceptedTokens) -> tuple[RowResult, ...]:
    """The result of each of the step's rows."""
    scores = {sequence_id: _scores_of(parts) for sequence_id, parts in step.scored.items()}
    vectors = dict[SequenceId, Vector](one for part in step.pooled for one in part.read())

    def result(row: Row) -> RowResult:
        sequence_id = row.sequence_id
        own_scores = scores.get(sequence_id, ())
        tokens = accepted.get(sequence_id)
        if own_scores is None or (tokens is not None and not tokens):
            return Failed(UNUSABLE)
        if sequence_id in step.late:
            return Late(own_scores)
        if tokens is not None and isinstance(row, Verify):
            return Verified(tuple(tokens))
        if tokens is not None:
            return Sampled(tokens[0], own_scores)
        vector = vectors.get(sequence_id)
        if vector is not None and not np.isfinite(vector).all():
            return Failed(NO_VECTOR)
        return Prefilled(own_scores, vector)

    return tuple(map(result, step.rows))


def _scores_of(parts: Sequence[Scored]) -> tuple[TokenLogprob, ...] | None:
    """The scores of a row's tokens; None where any of its logits are no distribution."""
    scores = list[TokenLogprob]()
    for part in parts:
        if (part_scores := part.read()) is None:
            return None
        scores += part_scores
    return tuple(scores)
