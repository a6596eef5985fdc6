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

import mlx.core as mx
import numpy as np

from engine.core.step import Sampling, SequenceId
from engine.mlx_backend.batch import BatchRow, SequenceTables
from engine.mlx_backend.decode.compiled import CompiledDecode, Unfit
from engine.mlx_backend.errors import one_line
from engine.mlx_backend.loading.selfcheck import deviation, tolerance
from engine.mlx_backend.model.cached_model import CachedModel
from engine.mlx_backend.model.layout import Layout
from engine.mlx_backend.sampling.row import SamplingRow
from engine.mlx_backend.storage.storage import Storage
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

RACE_SECONDS = 0.5
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
        self._builder: subprocess.Popen[bytes] | None = None
        self._model: CachedModel | None = None

    def choose_after(self, builder: "subprocess.Popen[bytes]", model: CachedModel) -> None:
        """Choose when this process, which builds the model's kernels, has ended."""
        self._builder, self._model = builder, model

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

    def stats(self) -> DecodeStats:
        """On any thread."""
        compiled = self.compiled
        n_compiled = 0 if compiled is None else compiled.steps[""]
        why = compiled.problem if compiled is not None and compiled.problem else self.why
        return DecodeStats(why, self.steps, n_compiled, is_chosen=self._builder is None)

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
            self.compiled = CompiledDecode(model, faster) if faster else None
            path = "compiled" if faster else "eager"
            self.why = f"{path}: a compiled step takes, of an eager one's time, {times} rows"
        mx.clear_cache()


class Rehearsal:
    """Rows of one model over storage of their own, computed eagerly and compiled."""

    def __init__(self, model: CachedModel, n_rows: int) -> None:
        """The storage is as `model` has it, but smaller. Raises Unfit."""
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
        self._compiled = CompiledDecode(self._model, wanted_steps=1)
        self.rows = [_row(index, layout) for index in range(n_rows)]
        self._tokens = mx.array(np.arange(n_rows) % layout.vocab_size, mx.uint32)

    def begin(self, whole_blocks: int) -> None:
        """Let the next token of the rows be the last of a block, or close before it."""
        for index, row in enumerate(self.rows):
            row.position = whole_blocks * self._block_size - 1 - index % 2
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

    def _padded_tokens(self, lines: int) -> mx.array:
        return mx.pad(self._tokens, (0, lines - len(self.rows)))


def compute_compiled(model: CachedModel) -> None:
    """Compute compiled steps of all kinds, so that their kernels are built. Raises whatever the
    model raises.
    """
    for n_rows in (1, SEVERAL):
        rehearsal = Rehearsal(model, n_rows)
        rehearsal.begin(NARROW)
        for _ in range(STEPS):
            rehearsal.compiled()


def _ratio(model: CachedModel, n_rows: int) -> float:
    """A compiled step's time over an eager one's. Raises Unfit where its logits are others."""
    rehearsal = Rehearsal(model, n_rows)
    for blocks in (NARROW, WIDE):
        rehearsal.begin(blocks)
        found = [rehearsal.compiled() for _ in range(STEPS)]
        rehearsal.begin(blocks)
        expected = [rehearsal.eager() for _ in range(STEPS)]
        _compare(mx.concatenate(found), mx.concatenate(expected), tolerance(model.layout))
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


def _row(index: int, layout: Layout) -> BatchRow:
    """A row whose blocks, slots and state are its own."""
    n_windows, n_blocks = len(layout.windows), WIDE + 2
    tables = SequenceTables(n_windows + bool(layout.states))
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
            layer.put_arrays(
                [mx.random.normal(pool.shape).astype(pool.dtype) for pool in layer.arrays()]
            )
        mx.eval(arena.arrays())
