"""Chooses whether a model's steady decodes are compiled: only where that is correct, and faster.

A rehearsal computes the same steps compiled and eagerly, over a small storage of random K and V.
The logits must agree, and compiled steps must take less time. The rehearsal takes place at load.

On a CPU MLX has g++ build a kernel for each operation that it fuses (`loading/compiler.py`). The
rehearsal and `compute_draws` compute all kinds of them, so that no step of a request waits for g++.
"""

import time
from collections.abc import Callable
from itertools import pairwise, product

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module

from engine.api import Report, one_line
from engine.core.step import NO_MASKS, Sampling, SequenceId
from engine.mlx_backend.batch import BatchRow
from engine.mlx_backend.decode.compiled import CompiledDecode, CompiledDraws, Unfit
from engine.mlx_backend.kv.layout import Layout
from engine.mlx_backend.kv.storage import Storage
from engine.mlx_backend.loading.compiler import failure_of_compiler
from engine.mlx_backend.loading.memory import (
    REHEARSAL_BLOCKS,
    REHEARSAL_ROWS,
    rehearsal_sizes,
)
from engine.mlx_backend.loading.selfcheck import Agree, alone, deviation, tolerance
from engine.mlx_backend.model.cached_model import CachedModel, Execution
from engine.mlx_backend.model.patches import NO_ADAPTER
from engine.mlx_backend.model.sequences import SequenceTables
from engine.mlx_backend.sampling.draws import Draw, DrawParams, Kind, draw
from engine.mlx_backend.sampling.edits import SamplingRow
from engine.mlx_backend.sampling.sampler import Sampler
from engine.mlx_backend.sampling.xtc import ExcludeTop, SortedExcludeTop
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

RACE_SECONDS = 0.25
LEAST_PAIRS, MOST_PAIRS = 4, 8
WINS = 0.98
"""A compiled step must take less than this share of an eager step's time."""


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

    def choose(self, model: CachedModel, report: Report, agree: Agree = alone) -> None:
        """Rehearse over a storage of its own, and let the faster path serve `model`. With ranks all
        take the same; an error is raised there, after which they would wait for each other.
        """
        try:
            ratios = _ratios(model, report, agree)
        except Unfit as reason:
            self.why = f"eager: {reason}"
        except Exception as error:  # a model may raise anything while it is traced
            if agree is not alone:
                raise
            self.fail(error)
        else:
            times = ", ".join(f"{ratio:.2f} at {n}" for n, ratio in ratios.items())
            faster = {min(n, 2) for n, ratio in ratios.items() if ratio < WINS}
            if faster:
                self.use(CompiledDecode(model, faster))
            path = "compiled" if faster else "eager"
            self.why = f"{path}: a compiled step takes, of an eager one's time, {times} rows"
        mx.clear_cache()

    def fail(self, error: Exception) -> None:
        """Decode eagerly, because of an error that occurred before anything was served."""
        problem = f"{type(error).__name__}: {one_line(error)}"
        if failure := failure_of_compiler(error):
            problem = failure
            mx.disable_compile()  # eager steps fuse some operations, too
        self.compiled, self._draws = None, None
        self.problem, self.why = problem, f"eager: {problem}"

    def use(self, compiled: CompiledDecode) -> None:
        """Decode by `compiled` from now on, and draw by compiled functions."""
        self.compiled, self._draws = compiled, CompiledDraws()

    def draw(self, kind: Kind, logits: mx.array, params: DrawParams) -> Draw:
        """Draw tokens as `draws.draw` does, by a compiled function where decodes are compiled. XTC
        is seldom used and was not rehearsed, so that a step would wait for its compilation.
        """
        if self._draws is not None and not isinstance(kind, ExcludeTop | SortedExcludeTop):
            try:
                return self._draws.draw(kind, logits, params)
            except Exception as error:  # MLX may raise anything
                self.give_up(error)
        return draw(kind, logits, params)

    def give_up(self, error: Exception) -> None:
        """Compute everything eagerly from now on, because something compiled has failed."""
        if failure_of_compiler(error):
            mx.disable_compile()  # eager steps fuse some operations, too
        self._draws = None
        if self.compiled is not None:
            self.compiled.give_up(error)

    def stats(self) -> DecodeStats:
        """How decodes are computed now. Any thread may call it."""
        compiled = self.compiled
        if compiled is None:
            return DecodeStats(self.why, self.steps, 0, self.problem)
        why = f"eager: {compiled.problem}" if compiled.problem else self.why
        return DecodeStats(why, self.steps, compiled.steps[""], compiled.problem)


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
        for layer in arena.layers:
            n_slots = layer.block_size
            slots = mx.tile(mx.arange(n_slots, dtype=mx.uint32), [arena.n_blocks])
            written = mx.repeat(every, n_slots), slots
            sizes = arena.n_blocks, layer.shape.kv_heads, n_slots
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

    def check(self, agree: Agree = alone) -> None:
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
                error = agree(deviation(found, expected))
                if not error < largest:
                    raise Unfit(f"its logits are wrong by {error:.1%} of their size")
                likeliest = mx.argmax(found, axis=1, keepdims=True)
                chosen = mx.take_along_axis(expected, likeliest, axis=1)
                lost = expected.max(axis=1, keepdims=True) - chosen
                if agree(float((lost / mx.abs(expected).max()).max())) > largest:
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


def compute_draws(path: DecodePath, layout: Layout, report: Report) -> None:
    """Draw tokens in all ways from logits of the model's kind, so that MLX builds the kernels of
    draws. Where it cannot, `path` fails.
    """
    sampler = Sampler(layout.vocab_size)
    try:
        for n_done, (params, n_rows) in enumerate(product(SAMPLED, REHEARSED_ROWS)):
            report(f"preparing to sample, {n_done} of {len(SAMPLED) * len(REHEARSED_ROWS)}…")
            logits = mx.random.normal((n_rows, layout.vocab_size)).astype(layout.logits_dtype)
            rows = [SamplingRow(Sampling(params, seed=0, output_tokens=(1,)))] * n_rows
            for sampler.draw_with in (path.draw, draw):  # rows of one kind, and of several
                for _ in range(2):  # the second draw begins with what the first has left
                    mx.eval(sampler.sample(logits, rows, NO_MASKS, ()).arrays())
                    rows[0].accept(1)  # all rows are the same object
            masks = np.full((n_rows, -(-layout.vocab_size // 32)), -1, np.int32)
            mx.eval(sampler.sample(logits, rows, masks, range(n_rows)).arrays())
    except Exception as error:  # MLX may raise anything
        path.fail(error)


def _ratios(model: CachedModel, report: Report, agree: Agree) -> dict[int, float]:
    """By numbers of rows, a compiled step's time over an eager step's, rehearsed over a storage of
    its own. Raises Unfit where compiled steps are wrong.
    """
    block_size, context_tokens = model.storage.full.block_size, model.context_tokens
    rehearsed = rehearsal_model(
        model.model, model.layout, model.execution, block_size, context_tokens
    )
    ratios = dict[int, float]()
    for n_rows in REHEARSED_ROWS:
        report(f"comparing compiled decodes with eager ones, {n_rows} at a time…")
        ratios[n_rows] = _ratio(rehearsed, n_rows, agree)
    for n_rows, adapter in product(REHEARSED_ROWS, model.execution.adapters.names[:1]):
        rehearsal = Rehearsal(rehearsed, n_rows, adapter)  # with kernels of its own
        rehearsal.begin(NARROW)
        rehearsal.compiled()
    return ratios


def _ratio(model: CachedModel, n_rows: int, agree: Agree) -> float:
    """The time of the fastest compiled step over that of the fastest eager step: other programs
    that use the machine only make steps slower. Raises Unfit where compiled steps are wrong, or not
    worth the time that it takes to compile them.
    """
    rehearsal = Rehearsal(model, n_rows)
    rehearsal.begin(NARROW)
    rehearsal.eager()  # the first step may build kernels
    seconds = agree(min(_step_seconds(rehearsal, rehearsal.eager)))
    if seconds > SLOW_STEP_SECONDS:
        raise Unfit(f"an eager step takes {seconds:.2g} s, little of it on the host")
    rehearsal.check(agree)
    pairs = [
        (
            min(_step_seconds(rehearsal, rehearsal.compiled)),
            min(_step_seconds(rehearsal, rehearsal.eager)),
        )
        for _ in range(min(max(int(RACE_SECONDS / (2 * STEPS * seconds)), LEAST_PAIRS), MOST_PAIRS))
    ]
    return agree(min(compiled for compiled, _ in pairs) / min(eager for _, eager in pairs))


def _step_seconds(rehearsal: Rehearsal, step: Callable[[], mx.array]) -> list[float]:
    """The time of each of a rehearsal's steps, computed by `step`."""
    rehearsal.begin(NARROW)
    times = [time.perf_counter()]
    for _ in range(STEPS):
        step()
        times.append(time.perf_counter())
    return [after - before for before, after in pairwise(times)]
