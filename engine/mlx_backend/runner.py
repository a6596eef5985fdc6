"""The model runner: a step's ops, prompt chunks, decodes and samples on the device."""

import gc
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from enum import Enum, auto
from itertools import chain
from traceback import clear_frames
from typing import NoReturn

import mlx.core as mx

from engine.api import one_line
from engine.core.step import (
    NOTHING_DRAFTED,
    NotDrafted,
    Prefill,
    RunnerLost,
    SequenceId,
    StepLost,
    StepMasks,
    StepPlan,
    StepResult,
    StorageLost,
)
from engine.mlx_backend.batch import Batch, BatchRow, StepInputs
from engine.mlx_backend.decode.choice import DecodePath
from engine.mlx_backend.draft_runner import DraftRunner, SampledRow
from engine.mlx_backend.host import MemoryMeter
from engine.mlx_backend.kv.states import are_computable
from engine.mlx_backend.model.batching import ForwardBatch
from engine.mlx_backend.model.cached_model import HIDDEN_STATES, CachedModel, Pooler
from engine.mlx_backend.model.rows import TokenSpan
from engine.mlx_backend.sampling.sampler import Sampler
from engine.mlx_backend.submitted_step import (
    AcceptedTokens,
    GivenUp,
    PendingForward,
    RowDraws,
    SubmittedStep,
    rows_of,
)
from engine.mlx_backend.vision.tower import ImageEncoder
from kvstore.ops import CopyBlock, FillBlock, When
from kvstore.types import BlockId, SlotId


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
        encoder: ImageEncoder | None = None,
    ) -> None:
        """`decode`: how steady decodes are computed; None: eagerly. `meter` measures each step.
        `draft`: of a draft model, if there is one. `encoder`: of images, if the model takes any.
        """
        self._model = model
        self._storage = model.storage
        self._sampler = sampler
        self._launch = launch
        self._pooler = pooler
        self._decode_path = decode
        self._meter = meter
        self._draft_runner = draft
        self._encoder = encoder
        if decode is not None:
            sampler.draw_with = decode.draw
        images = model.execution.images
        self._batch = Batch(model.n_groups, None if images is None else images.merge)
        self._in_flight: deque[SubmittedStep] = deque()

    def submit(self, plan: StepPlan) -> None:
        """See `ModelRunner.submit`."""
        if self._decode_path is not None:
            self._decode_path.steps += 1
        self._batch.change(plan)
        try:
            if not self._storage.has_room_for(plan):
                self._resize()
            self._in_flight.append(self._begin(plan))
        except Exception as error:
            self._settle(error)

    def launch(self) -> None:
        """See `ModelRunner.launch`."""
        with self._dropping_last():
            self._finish(self._in_flight[-1])

    def draw(self, masks: StepMasks) -> None:
        """See `ModelRunner.draw`."""
        with self._dropping_last():
            self._draw(self._in_flight[-1], masks)
            if self._decode_path is not None and self._decode_path.compiled is not None:
                self._decode_path.compiled.trace_ahead()

    def collect(self) -> StepResult:
        """See `ModelRunner.collect`."""
        try:
            return self._collect(self._in_flight.popleft())
        except Exception as error:
            self._in_flight.clear()
            self._settle(error)

    # What follows has a step in frames that an error leaves, so that the step's arrays can go.

    def _begin(self, plan: StepPlan) -> SubmittedStep:
        """Begin to launch a step's forwards."""
        step = SubmittedStep(plan.rows, self._given_up(), draft=plan.draft)
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
        return step

    def _finish(self, step: SubmittedStep) -> None:
        """Launch the rest of a step's forwards."""
        with self._computing(step):
            self._launch.finish(step.unlaunched)

    def _draw(self, step: SubmittedStep, masks: StepMasks) -> None:
        """Draw the tokens of a step, and keep the logits of rows whose masks are late."""
        with self._computing(step):
            step.late = frozenset(masks.late)
            if step.late and (saved := step.draws.keep(step.late)):
                # Launched now: `collect` would launch it after the next step's forwards. It writes
                # no pool, so no write that follows copies one.
                mx.async_eval(saved)
                step.awaited += saved
            if step.draws.rows:
                self._choose_tokens(step, masks)

    def _collect(self, step: SubmittedStep) -> StepResult:
        """Wait for a step that is not in flight any more."""
        if step.is_lost:
            raise StepLost("the KV cache that the step has written was lost")
        measuring = nullcontext() if self._meter is None else self._meter.step()
        with measuring, self._computing(step):
            mx.eval(step.awaited)
        if step.finite and self._encoder is not None:
            self._encoder.forget(step.check_images())
        accepted = step.accept_tokens()
        self._set_tokens_after_verification(step, accepted)
        parts = () if step.reads is None else step.reads.parts()
        drafted = self._continue(step, accepted)
        return StepResult(step.results(accepted), parts, drafted, step.not_encoded)

    @contextmanager
    def _dropping_last(self) -> Iterator[None]:
        """Within the context an error drops the step that was submitted last."""
        try:
            yield
        except Exception as error:
            self._in_flight.pop()
            self._settle(error)

    @contextmanager
    def _computing(self, step: SubmittedStep) -> Iterator[None]:
        """Within the context the device computes for a step. Where it fails, images are given up
        whose features cannot be computed, or else another attention than `gather`, or else what is
        compiled of the step. Raises StepLost if the step was computed with something that has been
        given up since.
        """
        try:
            yield
        except Exception as error:
            if lost := [] if self._encoder is None else self._encoder.settle():
                raise StepLost(str(error), dict.fromkeys(lost, _not_encoded(error))) from error
            attention, path = self._model.execution.attention, self._decode_path
            # It may be the failure of another step, which the device has begun before or ahead.
            awaited = [array for each in (step, *self._in_flight) for array in each.awaited]
            if attention.fallback is not None and not are_computable(awaited):
                attention.give_up(error)
            elif path is not None and step.is_compiled and not are_computable(step.awaited):
                path.give_up(error)
            if step.given_up == self._given_up():
                raise
            raise StepLost(f"{type(error).__name__}: {error}") from error

    def _given_up(self) -> GivenUp:
        """What has failed on the device, and computes no more steps."""
        compiled = None if self._decode_path is None else self._decode_path.compiled
        has_compiled_failed = compiled is not None and bool(compiled.problem)
        return GivenUp(bool(self._model.execution.attention.problem), has_compiled_failed)

    def _settle(self, error: Exception) -> NoReturn:
        """Raise the error of a step, which has been dropped, once all that is left is computed. If
        what the storage holds cannot be computed, raise StorageLost in place of StepLost, and
        RunnerLost in place of any other.
        """
        self._batch.settle()
        if self._encoder is not None:
            self._encoder.settle()
        try:
            self._storage.settle()
        except Exception as why:
            if not isinstance(error, StepLost):
                raise RunnerLost(f"the KV cache cannot be computed: {why}") from why
            self._renew_storage(error)
            raise StorageLost(str(error), error.not_encoded) from error
        raise error

    def _renew_storage(self, error: StepLost) -> None:
        """Begin with an empty storage. Raises RunnerLost where memory for it cannot be had."""
        # Arrays that cannot be computed refer to what they were to be computed from: all planes.
        self._batch.forget_tokens()
        if self._encoder is not None:
            self._encoder.forget_all()
        self._in_flight = deque(
            SubmittedStep(step.rows, step.given_up, is_lost=True) for step in self._in_flight
        )
        for each in (error, error.__cause__):
            clear_frames(None if each is None else each.__traceback__)
        gc.collect()  # a step and the generator of its forwards refer to each other
        try:
            self._storage.renew()
        except Exception as why:
            raise RunnerLost(f"the KV cache cannot be made anew: {why}") from why

    def resize_ahead(self) -> None:
        """Resize the arena if a step may soon need that, or memory is to be given back: while the
        engine is idle nobody waits for it. Raises RunnerLost where that fails.
        """
        if self._storage.should_resize():
            self._resize()

    def give_back(self, blocks: Sequence[BlockId], slots: Sequence[Sequence[SlotId]]) -> None:
        """Give back memory of blocks, and of slots of each group, that nobody uses. No op waits to
        be executed. Waits for what is in flight.
        """
        self._wait()
        mx.eval(self._storage.arrays())
        self._storage.give_back(blocks, slots)
        mx.eval(self._storage.arrays())  # states that were moved still refer to where they were

    def _resize(self) -> None:
        """Let the arena grow or shrink, and forget what was traced for its planes. Raises
        RunnerLost where that fails: some layers may have been resized.
        """
        self._wait()
        try:
            self._storage.resize()
        except Exception as error:
            raise RunnerLost(f"the KV cache cannot be resized: {error}") from error
        if self._decode_path is not None and self._decode_path.compiled is not None:
            self._decode_path.compiled.forget_traces()

    def _wait(self) -> None:
        """Wait for all that is in flight."""
        for step in self._in_flight:
            with self._computing(step):
                mx.eval(step.awaited)
        mx.synchronize()

    def _build_forwards(self, step: SubmittedStep, plan: StepPlan) -> Iterator[PendingForward]:
        """All forwards of the step, each to be launched before the next is built."""
        try:
            step.read = self._storage.execute(plan.ops_at(When.FIRST))
        finally:  # or a later `RollBackState`, for this step, would undo the step before
            self._storage.states.begin_step()
        yield from self._encode(step, plan)
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
        self, step: SubmittedStep, plan: StepPlan
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

    def _encode(self, step: SubmittedStep, plan: StepPlan) -> Iterator[PendingForward]:
        """The stages of images that a step encodes."""
        if self._encoder is None:
            return
        self._encoder.forget(plan.forget)
        for work in plan.encode:
            try:
                arrays = self._encoder.encode(work)
            except Exception as error:  # its file may be anything
                step.not_encoded[work.image.digest] = _not_encoded(error)
                self._encoder.forget([work.image.digest])
            else:
                if (finite := self._encoder.is_finite(work.image)) is not None:
                    step.finite[work.image.digest] = finite
                    arrays.append(finite)
                yield step.pending(arrays)

    def _decode(self, step: SubmittedStep, plan: StepPlan) -> PendingForward | None:
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
        self, step: SubmittedStep, inputs: StepInputs, batch: ForwardBatch
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
        self, step: SubmittedStep, token_ids: mx.array, prefill: Prefill, span: TokenSpan
    ) -> PendingForward:
        """A forward whose tokens are pooled, the first or all."""
        computed = self._model.forward(ForwardBatch(((span,),)), token_ids)
        pooled = self._pooler.chunk(computed, prefill.pooling, prefill.sequence_id)
        step.pooled.append(pooled)
        return step.pending([pooled.vectors, *computed.fences], computed.first_layer)

    def _score(
        self, step: SubmittedStep, token_ids: mx.array, prefill: Prefill, span: TokenSpan
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

    def _choose_tokens(self, step: SubmittedStep, masks: StepMasks) -> None:
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
            if self._decode_path is not None and are_computable(step.awaited):
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
        self, step: SubmittedStep, accepted: AcceptedTokens
    ) -> Mapping[SequenceId, tuple[int, ...]] | NotDrafted:
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

    def _set_tokens_after_verification(self, step: SubmittedStep, accepted: AcceptedTokens) -> None:
        """Rows with drafts continue after the accepted tokens, which only now are known."""
        rows = [one.row for one in step.draws.rows if one.drafts and accepted[one.row.sequence_id]]
        if rows:
            lasts = [accepted[row.sequence_id][-1].token_id for row in rows]
            self._batch.set_next_tokens(rows, mx.array(lasts, dtype=mx.uint32))


def _not_encoded(error: Exception) -> str:
    """Why a request whose image could not be encoded has failed."""
    return f"an image of the prompt cannot be encoded: {one_line(error)}"


def _add_resampled(step: SubmittedStep, rows: Sequence[BatchRow]) -> None:
    """Let the step draw for rows from the logits that an earlier step has saved."""
    for row in rows:
        step.draws.add([RowDraws(row)], row.take_saved_logits())
