"""Whether a model's steady decodes are compiled: only where that is right, and faster.

A rehearsal computes the same steps in both ways over a small storage of random K and V: the logits
must agree, and the compiled steps must take less time. It takes place at load. On a CPU, MLX has
the kernels of a compiled function built by g++, which takes 7 to 40 s for a model that a machine
has never compiled: then the model is served eagerly, a child process compiles its kernels
(`kernels.py`), and the rehearsal takes place when nothing is to be computed.
"""

import logging
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import TypeAlias

import mlx.core as mx
import numpy as np

from engine.api import one_line
from engine.core.step import NO_MASKS, Sampling, SequenceId
from engine.mlx_backend.batch import BatchRow, SequenceTables
from engine.mlx_backend.decode.compiled import CompiledDecode, CompiledDraws, Unfit
from engine.mlx_backend.kv.storage import Storage
from engine.mlx_backend.loading.selfcheck import deviation, tolerance
from engine.mlx_backend.model.cached_model import CachedModel
from engine.mlx_backend.model.layout import Layout
from engine.mlx_backend.model.patches import NO_ADAPTER
from engine.mlx_backend.sampling.draws import Draw, DrawParams, Kind, draw
from engine.mlx_backend.sampling.edits import SamplingRow
from engine.mlx_backend.sampling.sampler import Sampler
from engine.process.child import ending
from engine.values.request import SamplingParams
from engine.values.stats import DecodeStats
from kvstore.ops import ResetState, TablePatch
from kvstore.sizes import StateCounts, StorageSizes, WindowSize
from kvstore.types import SlotId

SEVERAL = 4
"""Rows of the rehearsal that stands for all steps of several rows."""

STEPS = 3
"""Of a rehearsal, from the last token of a block on: blocks begin within it."""

NARROW, WIDE = 3, 7
"""Whole blocks of a row before the rehearsal: of tables of two widths."""

SLOW_STEP_SECONDS = 0.2
"""A model whose eager steps take longer than this is served eagerly: what the host saves, some
milliseconds, would hardly be noticed, and the rehearsal would take seconds.
"""

SAMPLED = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6, top_k=20, top_p=0.95),
    SamplingParams(temperature=0.6, top_p=0.9),
    SamplingParams(temperature=0.0, repetition_penalty=1.1, logit_bias={1: 1.0}),
)
"""Of each kind of draw one, and edited logits: the kernels of others are the same, or few."""

BUILD_AFTER_STEPS = 64
"""Steady steps after which kernels are built: a model that only embeds needs none."""

StartBuilder: TypeAlias = Callable[[], "subprocess.Popen[bytes]"]
"""Starts the process that builds a model's kernels. Raises OSError."""

RACE_SECONDS = 0.25
WINS = 0.98
"""A compiled step must take less than this part of an eager one's time."""

logger = logging.getLogger(__name__)


class DecodePath:
    """How steady decodes are computed: by `compiled`, or eagerly where that is None. `why`: in
    words. `steps` counts all steps of the engine.
    """

    def __init__(self, why: str) -> None:
        """Eager, for that reason, until `choose` says more."""
        self.compiled: CompiledDecode | None = None
        self.why = f"eager: {why}"
        self.steps = 0
        self._draws: CompiledDraws | None = None
        self._start: StartBuilder | None = None  # where kernels are to be built first
        self._builder: subprocess.Popen[bytes] | None = None
        self._model: CachedModel | None = None
        self._steady_steps = 0

    def choose_after(self, start: StartBuilder, model: CachedModel) -> None:
        """Choose when the process that `start` returns has ended, which builds the model's kernels.
        It is started when the model has decoded for a while, or by `build`.
        """
        self._start, self._model = start, model

    @property
    def is_pending(self) -> bool:
        """Whether kernels are still to be built."""
        return self._start is not None

    def count_steady(self) -> None:
        """A steady step is computed eagerly because the kernels are not there."""
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
            self.why = f"eager: no process can be started to build its kernels: {error}"

    def settle(self) -> None:
        """Choose, once the kernels are there. To be called while nothing is computed."""
        if self._builder is None or self._builder.poll() is None:
            return
        assert self._model is not None
        code, self._builder = self._builder.returncode, None
        if code:
            self.why = f"eager: building its kernels ended with {ending(code)}"
        else:
            self.choose(self._model)
        logger.info("decode: %s", self.why)

    def use(self, compiled: CompiledDecode) -> None:
        """Decode by this from now on, and draw by compiled functions, too."""
        self.compiled, self._draws = compiled, CompiledDraws()

    def draw(self, kind: Kind, logits: mx.array, params: DrawParams) -> Draw:
        """As `draws.draw`, compiled where the forwards are."""
        if self._draws is not None:
            try:
                return self._draws.draw(kind, logits, params)
            except Exception as error:  # MLX may raise anything
                self.give_up(error)
        return draw(kind, logits, params)

    def give_up(self, error: Exception) -> None:
        """Something compiled has failed: all is eager from now on."""
        if "[Compile::eval_cpu]" in str(error):
            mx.disable_compile()  # eager steps fuse some operations, too
        self._draws = None
        if self.compiled is not None:
            self.compiled.give_up(error)

    def stats(self) -> DecodeStats:
        """On any thread."""
        compiled = self.compiled
        is_chosen = self._builder is None and not self.is_pending
        if compiled is None:
            return DecodeStats(self.why, self.steps, 0, is_chosen)
        why = f"eager: {compiled.problem}" if compiled.problem else self.why
        return DecodeStats(why, self.steps, compiled.steps[""], is_chosen)

    def close(self) -> None:
        """End the process that builds kernels, if it still runs."""
        if self._builder is not None:
            self._builder.kill()
            self._builder.wait()
            self._builder = None

    def choose(self, model: CachedModel) -> None:
        """Rehearse, and let the faster path serve."""
        try:
            ratios = {n_rows: _ratio(model, n_rows) for n_rows in (1, SEVERAL)}
        except Unfit as reason:
            self.why = f"eager: {reason}"
        except Exception as error:  # a model may raise anything while it is traced
            self.why = f"eager: {type(error).__name__}: {one_line(error)}"
        else:
            times = ", ".join(f"{ratio:.2f} at {n}" for n, ratio in ratios.items())
            faster = {min(n, 2) for n, ratio in ratios.items() if ratio < WINS}
            if faster:
                self.use(CompiledDecode(model, faster))
            path = "compiled" if faster else "eager"
            self.why = f"{path}: a compiled step takes, of an eager one's time, {times} rows"
        mx.clear_cache()


class Rehearsal:
    """Rows of one model over storage of their own, computed eagerly and compiled."""

    def __init__(self, model: CachedModel, n_rows: int, adapter: str = NO_ADAPTER) -> None:
        """The storage is as `model` has it, but smaller. All take the adapter. Raises Unfit."""
        layout, block_size = model.layout, model.storage.full.block_size
        n_blocks = n_rows * (WIDE + 2)
        sizes = StorageSizes(
            n_blocks,
            tuple(WindowSize(window, n_blocks) for window in layout.windows),
            StateCounts(n_rows, n_rows) if layout.states else None,
        )
        storage = Storage(layout, sizes, block_size)
        _randomize(storage)
        self._block_size = block_size
        self._model = CachedModel(model.model, layout, storage, model.execution)
        self._longest = model.context_tokens - STEPS - 1
        self._compiled = CompiledDecode(self._model, wanted_steps=1)
        self.rows = [_row(index, layout, adapter) for index in range(n_rows)]
        self._tokens = mx.array(np.arange(n_rows) % layout.vocab_size, mx.uint32)

    def begin(self, whole_blocks: int) -> None:
        """Let the next token of the rows be the last of a block, or close before it."""
        for index, row in enumerate(self.rows):
            position = whole_blocks * self._block_size - 1 - index % 2
            row.position = int(max(min(position, self._longest), 0))
        self._model.storage.states.begin_step()
        for row in self.rows if self._model.layout.states else ():
            slot = SlotId(int(row.tables.ids(-1)[0]))
            self._model.storage.states.execute(ResetState(slot))

    def eager(self) -> mx.array:
        """Logits of one token of each row, `[rows, vocabulary]`, computed when this returns."""
        spans = [row.take(1, index, index, 1) for index, row in enumerate(self.rows)]
        found = dict[int, mx.array]()
        for batch in self._model.arrange(spans).sampling:
            computed = self._model.forward(batch, self._tokens.astype(mx.int32))
            found.update(zip((span.index for span in batch.spans), computed.logits, strict=True))
        logits = mx.stack([found[index] for index in range(len(self.rows))])
        mx.eval(logits, self._model.storage.states.unevaluated())
        return logits

    def compiled(self) -> mx.array:
        """As `eager`, by the compiled path. Raises Unfit where that fails."""
        n = len(self.rows)
        logits = self._compiled.forward(self.rows, self._padded_tokens)
        if logits is None:
            raise Unfit(next(reason for reason in self._compiled.steps if reason))
        mx.eval(logits, self._model.storage.states.unevaluated())
        return logits[:n]

    def check(self) -> None:
        """Raises Unfit where compiled steps say something else than eager ones, or cannot be
        traced, and whatever the model raises.
        """
        for blocks in (NARROW, WIDE):
            self.begin(blocks)
            found = [self.compiled() for _ in range(STEPS)]
            self.begin(blocks)
            expected = [self.eager() for _ in range(STEPS)]
            most = tolerance(self._model.layout)
            _compare(mx.concatenate(found), mx.concatenate(expected), most)

    def _padded_tokens(self, lines: int) -> mx.array:
        return mx.pad(self._tokens, (0, lines - len(self.rows)))


def compute_compiled(model: CachedModel) -> None:
    """Compute compiled steps of all kinds, so that their kernels are built. Raises whatever the
    model raises.
    """
    sampler = Sampler(model.layout.vocab_size)
    for n_rows in (1, SEVERAL):
        for adapter in (NO_ADAPTER, *model.execution.adapters.names[:1]):
            rehearsal = Rehearsal(model, n_rows, adapter)
            rehearsal.begin(NARROW)
            for _ in range(STEPS):
                logits = rehearsal.compiled()
        for params in SAMPLED:
            rows = [SamplingRow(Sampling(params, seed=0, output_tokens=(1,)))] * n_rows
            sampler.draw_with = CompiledDraws().draw
            for _ in range(2):  # the second begins with what the first has left
                mx.eval(sampler.sample(logits, rows, NO_MASKS, ()).arrays())
                rows[0].accept(1)  # all are one


def _ratio(model: CachedModel, n_rows: int) -> float:
    """A compiled step's time over an eager one's. Raises Unfit where its logits are others."""
    rehearsal = Rehearsal(model, n_rows)
    rehearsal.check()
    seconds = _seconds(rehearsal, rehearsal.eager)
    if seconds > STEPS * SLOW_STEP_SECONDS:
        raise Unfit(f"an eager step takes {seconds / STEPS:.2g} s, little of it on the host")
    pairs = [
        (_seconds(rehearsal, rehearsal.compiled), _seconds(rehearsal, rehearsal.eager))
        for _ in range(min(max(int(RACE_SECONDS / (2 * seconds)), 2), 8))
    ]
    return statistics.median(compiled / eager for compiled, eager in pairs)


def _seconds(rehearsal: Rehearsal, step: Callable[[], mx.array]) -> float:
    rehearsal.begin(NARROW)
    started = time.perf_counter()
    for _ in range(STEPS):
        step()
    return time.perf_counter() - started


def _compare(found: mx.array, expected: mx.array, most: float) -> None:
    """Raises Unfit where logits `[rows, vocabulary]` differ by more than that, relative to their
    size, or where another token is the likeliest.
    """
    error = deviation(found, expected)
    if not error < most:
        raise Unfit(f"its logits are wrong by {error:.1%} of their size")
    chosen = mx.take_along_axis(expected, mx.argmax(found, axis=1, keepdims=True), axis=1)
    short = (expected.max(axis=1, keepdims=True) - chosen) / mx.abs(expected).max()
    if float(short.max()) > most:
        raise Unfit("its likeliest tokens are others")


def _row(index: int, layout: Layout, adapter: str) -> BatchRow:
    """A row whose blocks, slots and state are its own."""
    n_windows, n_blocks = len(layout.windows), WIDE + 2
    tables = SequenceTables(n_windows + bool(layout.states), adapter)
    ids = tuple(range(index * n_blocks, (index + 1) * n_blocks))
    for group in (None, *range(n_windows)):
        tables.patch(TablePatch(group, 0, ids))
    if layout.states:
        tables.patch(TablePatch(n_windows, 0, (index,)))
    sampling = SamplingRow(Sampling(SamplingParams(temperature=0.0), seed=0))
    return BatchRow(SequenceId(index), index, tables, sampling)


def _randomize(storage: Storage) -> None:
    """Fill the arenas with numbers about as large as K and V are."""
    for arena in (storage.full, *storage.windows):
        for layer in arena.layers:
            layer.planes = tuple(
                mx.random.normal(plane.shape).astype(plane.dtype) for plane in layer.planes
            )
        mx.eval(arena.planes())
