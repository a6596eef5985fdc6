"""The model runner: a step's ops, prompt chunks, decodes and samples on the device."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

import mlx.core as mx
import numpy as np

from engine.core.step import (
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
from engine.mlx_backend.kv.storage import NO_READS, PendingReads
from engine.mlx_backend.model.batching import ForwardBatch
from engine.mlx_backend.model.cached_model import HIDDEN_STATES, CachedModel, PendingVectors, Pooler
from engine.mlx_backend.model.rows import TokenSpan
from engine.mlx_backend.sampling.sampler import Drawn, Sampler, Scored
from engine.mlx_backend.sampling.verify import RowDraws, StepDraws, rows_of
from engine.values.output import TokenLogprob
from kvstore.ops import CopyBlock, When


@dataclass(frozen=True, slots=True)
class PendingForward:
    """A forward that has been built and not launched: the arrays to evaluate.

    `first_layer`: those of its first layer, which may be launched ahead of the others.
    """

    arrays: list[mx.array]
    first_layer: list[mx.array] = field(default_factory=list)


class Launch(Protocol):
    """Gives a step's forwards to the device, each before the next is built."""

    def begin(self, forwards: Iterator[PendingForward]) -> Iterator[PendingForward]:
        """Launch enough to keep the device busy, without waiting for the step before.

        Returns the rest.
        """
        ...

    def finish(self, rest: Iterator[PendingForward]) -> None:
        """Launch the rest. Returns while the device computes."""
        ...


class LaunchAhead:
    """Launches a step while the one before it is computed. For the CPU, where a task releases its
    inputs as soon as it has run, and a pool is written a whole forward after it was last read.

    MLX takes about fifty operations ahead of the CPU, and waits. With a whole forward it would wait
    until that is nearly computed, and the step before would be collected so much later. So only the
    first layer goes ahead, and of a compiled forward nothing: it takes the host too little time.
    """

    def begin(self, forwards: Iterator[PendingForward]) -> Iterator[PendingForward]:
        first = next(forwards, None)
        if first is None:
            return iter(())
        mx.async_eval(first.first_layer)
        return chain([PendingForward(first.arrays)], forwards)

    def finish(self, rest: Iterator[PendingForward]) -> None:
        for forward in rest:
            mx.async_eval(forward.arrays)


class LaunchWhenIdle:
    """Launches each forward when all that is in flight has been computed. For Metal and CUDA, which
    keep the buffers of a command buffer or graph until it completes: a pool in one of them would be
    copied.
    """

    def begin(self, forwards: Iterator[PendingForward]) -> Iterator[PendingForward]:
        for forward in forwards:
            mx.synchronize()
            mx.async_eval(forward.arrays)
        return iter(())

    def finish(self, rest: Iterator[PendingForward]) -> None:
        self.begin(rest)


def launch_for(device: mx.Device) -> Launch:
    """The launch that serves on a device."""
    return LaunchAhead() if device == mx.cpu else LaunchWhenIdle()


SCORED_TOKENS = 128
"""Prompt tokens scored in one forward: bounds the logits, `[tokens, vocabulary]`, in memory."""

UNUSABLE = "the model's logits leave no token to choose: not a number, or all ruled out"
NO_VECTOR = "the model's hidden states are no numbers"


@dataclass(slots=True)
class _SubmittedStep:
    """A step that has been submitted and not collected.

    `rest`: its forwards that have not been launched. Once `awaited` have been evaluated, all of the
    step is computed. `is_compiled`: whether its forward is.
    """

    rows: Sequence[Row]
    late: frozenset[SequenceId] = frozenset()
    rest: Iterator[PendingForward] = field(default_factory=lambda: iter(()))
    draws: StepDraws = field(default_factory=StepDraws)
    scored: dict[SequenceId, list[Scored]] = field(default_factory=dict)
    pooled: list[PendingVectors] = field(default_factory=list)
    awaited: list[mx.array] = field(default_factory=list)
    reads: PendingReads = NO_READS
    is_compiled: bool = False
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
        decode: DecodePath | None = None,
    ) -> None:
        self._model = model
        self._decode_path = decode
        self._pooler = pooler
        self._storage = model.storage
        self._sampler = sampler
        self._launch = launch
        self._batch = Batch(model.n_groups)
        if decode is not None:
            sampler.draw_with = decode.draw
        self._in_flight: deque[_SubmittedStep] = deque()

    def submit(self, plan: StepPlan) -> None:
        """See `ModelRunner.submit`."""
        if self._decode_path is not None:
            self._decode_path.steps += 1
        self._batch.change(plan)
        try:
            if not self._storage.has_room_for(plan):
                self._grow(plan)
            self._wait_for_reads()
            step = _SubmittedStep(plan.rows)
            step.rest = self._build_forwards(step, plan)
            copies = any(isinstance(op, CopyBlock) for op in plan.ops_at(When.FIRST))
            if not (copies and self._in_flight):
                with self._computing(step):
                    step.rest = self._launch.begin(step.rest)
            # Else a copy would wait here for the step in flight, whose tokens would be late. All of
            # this step is built and launched in `sample`, when that one is collected.
            self._in_flight.append(step)
        except Exception:
            self._settle()
            raise

    def sample(self, masks: Callable[[], StepMasks] | None) -> None:
        """See `ModelRunner.sample`."""
        step = self._in_flight[-1]
        try:
            with self._computing(step):
                self._launch.finish(step.rest)
            ruled_out = StepMasks() if masks is None else masks()
            step.late = frozenset(ruled_out.late)
            if step.late and (saved := step.draws.keep(step.late)):
                # Launched now: `collect` would launch it after the next step's forwards. It writes
                # no pool, so no write that follows copies one.
                mx.async_eval(saved)
                step.awaited += saved
            if step.draws.rows:
                self._draw(step, ruled_out)
            if self._decode_path is not None and self._decode_path.compiled is not None:
                self._decode_path.compiled.trace_ahead()
        except Exception:
            self._in_flight.pop()
            self._settle()
            raise

    def collect(self) -> StepResult:
        """See `ModelRunner.collect`."""
        step = self._in_flight.popleft()
        try:
            with self._computing(step):
                mx.eval(step.awaited)
            drawn = _drawn_tokens(step)
            self._set_tokens_after_verification(step, drawn)
            return StepResult(_row_results(step, drawn), step.reads.parts())
        except Exception:
            self._in_flight.clear()
            self._settle()
            raise

    @contextmanager
    def _computing(self, step: _SubmittedStep) -> Iterator[None]:
        """Within the context the device is given the step's forwards. A compiled one that fails is
        the last.
        """
        try:
            yield
        except Exception as error:
            if step.is_compiled and self._decode_path is not None:
                self._decode_path.give_up(error)
            raise

    def _settle(self) -> None:
        """After a failure. Raises RunnerLost when what the storage holds cannot be computed."""
        try:
            mx.eval(self._storage.arrays())
        except Exception as error:
            raise RunnerLost(f"the KV cache cannot be computed: {error}") from error

    def _grow(self, plan: StepPlan) -> None:
        """Let the arena grow; what has been traced for its planes is of no use any more. Raises
        RunnerLost where that fails: some layers may have grown.
        """
        mx.synchronize()
        try:
            self._storage.grow_for(plan)
        except Exception as error:
            raise RunnerLost(f"the KV cache cannot grow: {error}") from error
        if self._decode_path is not None and self._decode_path.compiled is not None:
            self._decode_path.compiled.forget_traces()

    def _wait_for_reads(self) -> None:
        """Reads that are not computed refer to the arenas' arrays, and a write would copy these."""
        if any(step.reads.arrays() for step in self._in_flight):
            mx.synchronize()

    def _build_forwards(self, step: _SubmittedStep, plan: StepPlan) -> Iterator[PendingForward]:
        """All forwards of the step, each to be launched before the next is built."""
        self._storage.execute(plan.ops_at(When.FIRST))
        self._storage.states.begin_step()
        if (decoded := self._decode(step, plan)) is not None:
            yield decoded
        else:
            yield from self._build_eager_forwards(step, plan)
        self._storage.execute(plan.ops_at(When.LAST))
        if saved := self._storage.states.unevaluated():
            yield step.pending(saved)
        self._read(step, plan)

    def _build_eager_forwards(
        self, step: _SubmittedStep, plan: StepPlan
    ) -> Iterator[PendingForward]:
        """The step's forwards without a compiled one, prompts before decodes."""
        inputs = self._batch.prepare_inputs(plan)
        forwards = self._model.arrange(inputs.spans)
        for batch in forwards.prompts:
            yield self._prefill(step, inputs, batch)
        for prefill, span in inputs.scored:
            yield from self._score(step, inputs, prefill, span)
        for prefill, span in inputs.gathered:
            yield self._pool(step, inputs, prefill, span)
        self._storage.execute(plan.ops_at(When.AFTER_PREFILLS))
        for batch in forwards.sampling:
            yield self._compute(step, inputs, batch)
        _add_resampled(step, inputs.resampled)

    def _decode(self, step: _SubmittedStep, plan: StepPlan) -> PendingForward | None:
        """The compiled forward of a steady step; None where the eager path is to compute it."""
        path = self._decode_path
        if path is None or (path.compiled is None and not path.is_pending):
            return None
        found = self._batch.decoding_rows(plan)
        if found is None:
            return None
        if path.compiled is None:
            path.count_steady()
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
        self, step: _SubmittedStep, inputs: StepInputs, prefill: Prefill, span: TokenSpan
    ) -> PendingForward:
        """A forward whose tokens are pooled, the first or all."""
        computed = self._model.forward(ForwardBatch(((span,),)), inputs.token_ids)
        pooled = self._pooler.chunk(computed, prefill.pooling, prefill.sequence_id)
        step.pooled.append(pooled)
        return step.pending([pooled.vectors, *computed.fences], computed.first_layer)

    def _score(
        self, step: _SubmittedStep, inputs: StepInputs, prefill: Prefill, span: TokenSpan
    ) -> Iterator[PendingForward]:
        """Forwards that score the token after each of a row's, SCORED_TOKENS at a time."""
        assert prefill.score is not None
        step.scored[prefill.sequence_id] = []
        for first, part in span.split(SCORED_TOKENS):
            following = prefill.score.next_tokens[first : first + part.n_tokens]
            yield self._score_part(step, inputs, prefill, part, following)

    def _score_part(
        self,
        step: _SubmittedStep,
        inputs: StepInputs,
        prefill: Prefill,
        span: TokenSpan,
        following: Sequence[int],
    ) -> PendingForward:
        """`following`: the tokens to score, from the one after the span's first on."""
        computed = self._model.forward(ForwardBatch(((span,),)), inputs.token_ids)
        arrays = computed.fences
        if following:
            assert prefill.score is not None
            logits = computed.logits[: len(following)]
            scored = self._sampler.score(logits, following, prefill.score.n_top)
            step.scored[prefill.sequence_id].append(scored)
            arrays = arrays + scored.arrays()
        return step.pending(arrays, computed.first_layer)

    def _read(self, step: _SubmittedStep, plan: StepPlan) -> None:
        """Launched after the forwards, on GPUs too: it writes nothing, so nothing is copied."""
        reads = plan.reads
        if not reads:
            return
        step.reads = self._storage.read(reads)
        mx.async_eval(step.reads.arrays())
        step.awaited += step.reads.arrays()

    def _draw(self, step: _SubmittedStep, masks: StepMasks) -> None:
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

    def _set_tokens_after_verification(self, step: _SubmittedStep, drawn: "_Drawn") -> None:
        """Rows with drafts continue after what was accepted: only now is that known."""
        rows = [one.row for one in step.draws.rows if one.drafts and drawn[one.row.sequence_id]]
        if rows:
            lasts = [drawn[row.sequence_id][-1].token_id for row in rows]
            self._batch.set_next_tokens(rows, mx.array(lasts, dtype=mx.uint32))


def _add_resampled(step: _SubmittedStep, rows: Sequence[BatchRow]) -> None:
    """Let the step draw for rows from the logits that an earlier step has saved."""
    for row in rows:
        step.draws.add([RowDraws(row)], row.take_saved_logits())


_Drawn = Mapping[SequenceId, Sequence[SampledToken]]
"""The tokens that count of each row that was drawn; none where one of them could not be drawn."""


def _drawn_tokens(step: _SubmittedStep) -> _Drawn:
    """Read the step's draws, and move its rows to after the tokens that count."""
    found: dict[SequenceId, Sequence[SampledToken]] = {}
    tokens = step.drawn.read() if step.drawn is not None else []
    for one, accepted in step.draws.accepted_tokens(tokens):
        if accepted is not None:
            one.accept(accepted)
        found[one.row.sequence_id] = accepted or ()
    return found


def _row_results(step: _SubmittedStep, drawn: _Drawn) -> tuple[RowResult, ...]:
    scores = dict[SequenceId, tuple[TokenLogprob, ...] | None]()  # None: not all could be computed
    for sequence_id, parts in step.scored.items():
        reports = [part.read() for part in parts]
        usable = [report for report in reports if report is not None]
        is_whole = len(usable) == len(reports)
        scores[sequence_id] = tuple(one for part in usable for one in part) if is_whole else None
    vectors = dict[SequenceId, Vector](one for part in step.pooled for one in part.read())

    def result(row: Row) -> RowResult:
        sequence_id = row.sequence_id
        own_scores = scores.get(sequence_id, ())
        tokens = drawn.get(sequence_id)
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
