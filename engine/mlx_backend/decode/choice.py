"""Chooses whether a model's steady decodes are compiled: only where that is correct, and faster.

A rehearsal computes the same steps compiled and eagerly, over a small storage of random K and V.
The logits must agree, and compiled steps must take less time. The rehearsal takes place at load.

On a CPU MLX has g++ build the kernels of a compiled function, which takes 7 to 40 s for a model
that this machine has never compiled. Such a model is served eagerly until a child process has built
its kernels (`kernels.py`); the rehearsal then takes place while the engine is idle.
"""

import logging
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module

from engine.api import one_line
from engine.core.step import NO_MASKS, Sampling, SequenceId
from engine.mlx_backend.batch import BatchRow, SequenceTables
from engine.mlx_backend.decode.compiled import CompiledDecode, CompiledDraws, Unfit
from engine.mlx_backend.kv.storage import Storage
from engine.mlx_backend.loading.memory import (
    REHEARSAL_BLOCKS,
    REHEARSAL_ROWS,
    rehearsal_sizes,
)
from engine.mlx_backend.loading.selfcheck import deviation, tolerance
from engine.mlx_backend.model.cached_model import CachedModel, Execution
from engine.mlx_backend.model.layout import Layout
from engine.mlx_backend.model.patches import NO_ADAPTER
from engine.mlx_backend.sampling.draws import Draw, DrawParams, Kind, draw
from engine.mlx_backend.sampling.edits import SamplingRow
from engine.mlx_backend.sampling.sampler import Sampler
from engine.process.child import ending
from engine.values.request import SamplingParams
from engine.values.stats import DecodeStats
from kvstore.ops import ResetState, TablePatch
from kvstore.types import SlotId

REHEARSED_ROWS = (1, REHEARSAL_ROWS)
"""Numbers of rows that are rehearsed: one row, and several, which stand for any larger number."""

STEPS = 3
"""Steps of a rehearsal."""

NARROW, WIDE = 3, REHEARSAL_BLOCKS - 2
"""Full blocks of a row before a rehearsal: with these two, block tables have different widths. The
steps begin with the last token of a block, so that they also begin a new block.
"""

SLOW_STEP_SECONDS = 0.2
"""A model whose eager steps take longer than this is served eagerly. Compiling saves some
milliseconds on the host, which would hardly be noticed, and the rehearsal would take seconds.
"""

SAMPLED = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6, top_k=20, top_p=0.95),
    SamplingParams(temperature=0.6, top_p=0.9),
    SamplingParams(temperature=0.0, repetition_penalty=1.1, logit_bias={1: 1.0}),
    SamplingParams(temperature=0.0, top_logprobs=1),
)
"""One of each kind of draw, edited logits, and log-probabilities: other parameters use the same
kernels, or few more.
"""

HALF_TOLERANCE = 0.1
"""The largest error of a rehearsal's logits in half precision, relative to their size: twice what
the check at load allows. A rehearsal's K and V are random and of unit size, so that a token attends
to few others, and rounding changes more than in a text: on an H200 by up to 5.4%.
"""

BUILD_AFTER_STEPS = 64
"""Steady steps after which kernels are built: a model that only embeds needs none."""

StartBuilder: TypeAlias = Callable[[], "subprocess.Popen[bytes]"]
"""Starts the process that builds a model's kernels. Raises OSError."""

RACE_SECONDS = 0.25
WINS = 0.98
"""A compiled step must take less than this share of an eager step's time."""

logger = logging.getLogger(__name__)


class DecodePath:
    """How steady decodes are computed: by `compiled`, or eagerly where that is None.

    `why` is the reason, in words; `problem` the failure for which decodes are eager, if that is the
    reason. `steps` counts all steps of the engine.
    """

    def __init__(self, why: str) -> None:
        """Decode eagerly, for the reason `why`, until `choose` finds a faster way."""
        self.compiled: CompiledDecode | None = None
        self.why = f"eager: {why}"
        self.problem = ""
        self.steps = 0
        self._draws: CompiledDraws | None = None
        self._start: StartBuilder | None = None  # None unless kernels are still to be built
        self._builder: subprocess.Popen[bytes] | None = None
        self._model: CachedModel | None = None
        self._steady_steps = 0

    def choose_after(self, start: StartBuilder, model: CachedModel) -> None:
        """Choose when the process that `start` returns, which builds the model's kernels, has
        ended. It is started when the model has decoded for a while, or by `build`.
        """
        self._start, self._model = start, model

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """While kernels are missing, operations in the block are not fused: for each fused one MLX
        would have g++ build a kernel within the step, which takes the better part of a second.
        """
        if not self.is_pending and self._builder is None:
            yield
            return
        mx.disable_compile()
        try:
            yield
        finally:
            mx.enable_compile()

    @property
    def is_pending(self) -> bool:
        """Whether the process that builds kernels has not been started yet."""
        return self._start is not None

    def count_steady(self) -> None:
        """Count a steady step that is computed eagerly because kernels are missing. After
        BUILD_AFTER_STEPS of them, start to build the kernels.
        """
        self._steady_steps += 1
        if self._steady_steps == BUILD_AFTER_STEPS:
            self.build()

    def build(self) -> None:
        """Start to build the kernels."""
        if self._start is None:
            return
        start, self._start = self._start, None
        try:
            self._builder = start()
        except OSError as error:
            self._fail(f"no process can be started to build its kernels: {error}")

    def settle(self) -> None:
        """Choose, if kernels have been built since the last call. Only for an idle engine."""
        if self._builder is None or self._builder.poll() is None:
            return
        assert self._model is not None
        code, self._builder = self._builder.returncode, None
        if code:
            self._fail(f"building its kernels ended with {ending(code)}")
        else:
            self.choose(self._model)
        logger.info("decode: %s", self.why)

    def choose(self, model: CachedModel) -> None:
        """Rehearse over a storage of its own, and let the faster path serve `model`."""
        try:
            ratios = _ratios(model)
        except Unfit as reason:
            self.why = f"eager: {reason}"
        except Exception as error:  # a model may raise anything while it is traced
            self._fail(f"{type(error).__name__}: {one_line(error)}")
        else:
            times = ", ".join(f"{ratio:.2f} at {n}" for n, ratio in ratios.items())
            faster = {min(n, 2) for n, ratio in ratios.items() if ratio < WINS}
            if faster:
                self.use(CompiledDecode(model, faster))
            path = "compiled" if faster else "eager"
            self.why = f"{path}: a compiled step takes, of an eager one's time, {times} rows"
        mx.clear_cache()

    def _fail(self, problem: str) -> None:
        self.problem, self.why = problem, f"eager: {problem}"

    def use(self, compiled: CompiledDecode) -> None:
        """Decode by `compiled` from now on, and draw by compiled functions."""
        self.compiled, self._draws = compiled, CompiledDraws()

    def draw(self, kind: Kind, logits: mx.array, params: DrawParams) -> Draw:
        """Draw tokens as `draws.draw` does, by a compiled function where decodes are compiled."""
        if self._draws is not None:
            try:
                return self._draws.draw(kind, logits, params)
            except Exception as error:  # MLX may raise anything
                self.give_up(error)
        return draw(kind, logits, params)

    def give_up(self, error: Exception) -> None:
        """Compute everything eagerly from now on, because something compiled has failed."""
        if "[Compile::eval_cpu]" in str(error):
            mx.disable_compile()  # eager steps fuse some operations, too
        self._draws = None
        if self.compiled is not None:
            self.compiled.give_up(error)

    def stats(self) -> DecodeStats:
        """How decodes are computed now. Any thread may call it."""
        compiled = self.compiled
        is_chosen = self._builder is None and not self.is_pending
        if compiled is None:
            return DecodeStats(self.why, self.steps, 0, is_chosen, self.problem)
        why = f"eager: {compiled.problem}" if compiled.problem else self.why
        return DecodeStats(why, self.steps, compiled.steps[""], is_chosen, compiled.problem)

    def close(self) -> None:
        """End the process that builds kernels, if it still runs."""
        if self._builder is not None:
            self._builder.kill()
            self._builder.wait()
            self._builder = None


def rehearsal_model(
    model: Module,
    layout: Layout,
    execution: Execution,
    block_size: int,
    context_tokens: float,
) -> CachedModel:
    """The model over the storage of its rehearsals. The arenas hold numbers about as large as K and
    V are.
    """
    storage = Storage(layout, rehearsal_sizes(layout.windows, bool(layout.states)), block_size)
    for arena in (storage.full, *storage.windows):
        every = mx.arange(arena.n_blocks, dtype=mx.uint32)
        slots = mx.arange(block_size, dtype=mx.uint32)
        written = mx.repeat(every, block_size), mx.tile(slots, [arena.n_blocks])
        for layer in arena.layers:
            sizes = arena.n_blocks, layer.shape.kv_heads, block_size
            keys, values = (
                mx.random.normal((*sizes, dim)).astype(dtype) for dim, dtype in layer.shape.vectors
            )
            layer.write(arena.slot_mapping(*written, layer.heads), keys, values)
            mx.eval(layer.planes)  # one layer at a time, because the numbers are made in float32
    return CachedModel(model, layout, storage, execution, context_tokens=context_tokens)


class Rehearsal:
    """Rows of a model that `rehearsal_model` has made, computed eagerly and compiled."""

    def __init__(self, model: CachedModel, n_rows: int, adapter: str = NO_ADAPTER) -> None:
        """Rehearse `n_rows` rows, at most REHEARSAL_ROWS. All take `adapter`. Raises Unfit."""
        self._model = model
        self._block_size = model.storage.full.block_size
        self._longest = model.context_tokens - STEPS - 1
        self._compiled = CompiledDecode(model, wanted_steps=1)
        self.rows = [self._new_row(index, adapter) for index in range(n_rows)]
        self._tokens = mx.array(np.arange(n_rows) % model.layout.vocab_size, mx.uint32)

    def begin(self, full_blocks: int) -> None:
        """Set the rows to `full_blocks` blocks less their last token, or two; reset states."""
        for index, row in enumerate(self.rows):
            position = full_blocks * self._block_size - 1 - index % 2
            row.position = int(max(min(position, self._longest), 0))
        self._model.storage.states.begin_step()
        for row in self.rows if self._model.layout.states else ():
            slot = SlotId(int(row.tables.ids(-1)[0]))
            self._model.storage.states.execute(ResetState(slot))

    def eager(self) -> mx.array:
        """Compute one token of each row eagerly. Returns their logits, `[rows, vocabulary]`."""
        spans = [row.take(1, index, index, 1) for index, row in enumerate(self.rows)]
        found = dict[int, mx.array]()
        for batch in self._model.arrange(spans).sampling:
            computed = self._model.forward(batch, self._tokens.astype(mx.int32))
            found.update(zip((span.index for span in batch.spans), computed.logits, strict=True))
        logits = mx.stack([found[index] for index in range(len(self.rows))])
        mx.eval(logits, self._model.storage.states.unevaluated())
        return logits

    def compiled(self) -> mx.array:
        """Compute one token of each row by the compiled path. Returns their logits,
        `[rows, vocabulary]`. Raises Unfit where it cannot be compiled.
        """
        n_rows = len(self.rows)
        logits = self._compiled.forward(
            self.rows, lambda lines: mx.pad(self._tokens, (0, lines - n_rows))
        )
        if logits is None:
            raise Unfit(next(reason for reason in self._compiled.steps if reason))
        mx.eval(logits, self._model.storage.states.unevaluated())
        return logits[:n_rows]

    def check(self) -> None:
        """Raise Unfit where the logits of compiled steps differ from those of eager steps, or
        another token is the likeliest. Also raises whatever the model raises.
        """
        largest = tolerance(self._model.layout, HALF_TOLERANCE)
        for blocks in (NARROW, WIDE):
            self.begin(blocks)
            compiled_steps = [self.compiled() for _ in range(STEPS)]
            self.begin(blocks)
            for found in compiled_steps:
                expected = self.eager()
                error = deviation(found, expected)
                if not error < largest:
                    raise Unfit(f"its logits are wrong by {error:.1%} of their size")
                likeliest = mx.argmax(found, axis=1, keepdims=True)
                chosen = mx.take_along_axis(expected, likeliest, axis=1)
                lost = expected.max(axis=1, keepdims=True) - chosen
                if float((lost / mx.abs(expected).max()).max()) > largest:
                    raise Unfit("its likeliest tokens are others")

    def _new_row(self, index: int, adapter: str) -> BatchRow:
        """A row whose blocks, slots and state belong to no other row."""
        layout, n_windows = self._model.layout, len(self._model.layout.windows)
        tables = SequenceTables(self._model.n_groups, adapter)
        ids = tuple(range(index * REHEARSAL_BLOCKS, (index + 1) * REHEARSAL_BLOCKS))
        for group in (None, *range(n_windows)):
            tables.patch(TablePatch(group, 0, ids))
        if layout.states:
            tables.patch(TablePatch(n_windows, 0, (index,)))
        sampling = SamplingRow(Sampling(SamplingParams(temperature=0.0), seed=0))
        return BatchRow(SequenceId(index), index, tables, sampling)


def compute_compiled(model: CachedModel) -> None:
    """Compute compiled steps of all kinds over a model that `rehearsal_model` has made, so that
    MLX builds their kernels. Raises whatever the model raises.
    """
    sampler = Sampler(model.layout.vocab_size)
    for n_rows in REHEARSED_ROWS:
        for adapter in (NO_ADAPTER, *model.execution.adapters.names[:1]):
            rehearsal = Rehearsal(model, n_rows, adapter)
            rehearsal.begin(NARROW)
            for _ in range(STEPS):
                logits = rehearsal.compiled()
        for params in SAMPLED:
            rows = [SamplingRow(Sampling(params, seed=0, output_tokens=(1,)))] * n_rows
            for sampler.draw_with in (CompiledDraws().draw, draw):  # of one kind, and of several
                for _ in range(2):  # the second draw begins with what the first has left
                    mx.eval(sampler.sample(logits, rows, NO_MASKS, ()).arrays())
                    rows[0].accept(1)  # all rows are the same object
        masks = np.full((n_rows, -(-model.layout.vocab_size // 32)), -1, np.int32)
        mx.eval(sampler.sample(logits, rows, masks, range(n_rows)).arrays())


def _ratios(model: CachedModel) -> dict[int, float]:
    """By numbers of rows, a compiled step's time over an eager step's, rehearsed over a storage of
    its own. Raises Unfit where compiled steps are wrong.
    """
    block_size, context_tokens = model.storage.full.block_size, model.context_tokens
    rehearsed = rehearsal_model(
        model.model, model.layout, model.execution, block_size, context_tokens
    )
    return {n_rows: _ratio(rehearsed, n_rows) for n_rows in REHEARSED_ROWS}


def _ratio(model: CachedModel, n_rows: int) -> float:
    """A compiled step's time over an eager step's. Raises Unfit where compiled steps are wrong."""
    rehearsal = Rehearsal(model, n_rows)
    rehearsal.check()
    seconds = _seconds(rehearsal, rehearsal.eager)
    if seconds > STEPS * SLOW_STEP_SECONDS:
        step_seconds = seconds / STEPS
        raise Unfit(f"an eager step takes {step_seconds:.2g} s, little of it on the host")
    pairs = [
        (_seconds(rehearsal, rehearsal.compiled), _seconds(rehearsal, rehearsal.eager))
        for _ in range(min(max(int(RACE_SECONDS / (2 * seconds)), 2), 8))
    ]
    return statistics.median(compiled / eager for compiled, eager in pairs)


def _seconds(rehearsal: Rehearsal, step: Callable[[], mx.array]) -> float:
    """The time of a rehearsal's steps, computed by `step`."""
    rehearsal.begin(NARROW)
    started = time.perf_counter()
    for _ in range(STEPS):
        step()
    return time.perf_counter() - started
