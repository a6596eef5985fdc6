"""Compiled decode: a steady decode step as one `mx.compile` function, replayed while rows stay.

A step in which each row decodes one token has the same graph each time, while the number of rows
and the width of their block tables stay the same. The graph is traced once for each such shape and
replayed: MLX then runs no Python for it, fuses what is elementwise, and computes equal parts once.
The model is mlx-lm's, unchanged: it is called while tracing, with views over the traced arrays.

The batch lives on the device (`batch.py`): positions advance there, and block tables are patched
where a row begins a block. The pools of the arenas and the recurrent states are inputs and outputs
of the function, so that MLX writes to them in place.

What else a step may do (prompts, drafts, storage ops) takes the eager path of `cached_model.py`,
which is also what the compiled one is checked against at load (`choice.py`).
"""

import logging
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TypeAlias, TypeVar

import mlx.core as mx

from engine.api import one_line
from engine.mlx_backend.batch import BatchRow
from engine.mlx_backend.decode.batch import DecodeBatch, GroupTables, row_bucket, width_bucket
from engine.mlx_backend.kv.layout import ChunkedCacheSpec
from engine.mlx_backend.model.attention import ListedWork
from engine.mlx_backend.model.cached_model import CachedModel
from engine.mlx_backend.model.patches import TransposedWeights
from engine.mlx_backend.model.rows import ArenaForward, DecodeRows, pad_tables
from engine.mlx_backend.model.views import ForwardViews
from engine.mlx_backend.sampling.draws import Draw, DrawParams, Kind, draw
from kvstore.types import SlotId

logger = logging.getLogger(__name__)

MOST_TRACES = 64
"""Traces that are kept, the most recently used."""

ALL_ROWS = frozenset({1, 2})
"""One row, and several, which stand for any number of them."""

WANTED_STEPS = 4
"""Steps of a shape that are eager before it is traced: a trace takes about as long as they would
save, and rows that come and go leave many shapes at once.
"""

REFUSED_STEPS = 32
"""Steps for which rows stay refused, such as those of unlike lengths."""

PADDING_BLOCKS = 128
"""Blocks of padding, over all rows, that a step may read in vain, beyond an eighth of its own.

The eager path takes one more pass for each 64 of them (`cpu/cascade.py`), which costs as much.
"""


class Unfit(Exception):
    """Why a model's steps cannot be compiled, in a few words."""


Key = TypeVar("Key")
Trace = TypeVar("Trace")


class Traces(OrderedDict[Key, Trace]):
    """Functions that are traced once for each key. The MOST_TRACES used last are kept."""

    def use(self, key: Key, make: Callable[[Key], Trace]) -> Trace:
        """The function of a key, which is made where there is none."""
        if key not in self:
            self[key] = make(key)
            if len(self) > MOST_TRACES:
                self.popitem(last=False)  # MLX's own cache of it goes with it
        self.move_to_end(key)
        return self[key]


class CompiledDraws:
    """Draws by functions that are traced once for each kind and number of lines.

    Apart from the forward, or there would be a trace for each pair of a table's width and a kind.
    """

    def __init__(self) -> None:
        self._traces = Traces[tuple[Kind, int], Callable[..., Draw]]()

    def draw(self, kind: Kind, logits: mx.array, params: DrawParams) -> Draw:
        """As `draws.draw`. Raises whatever MLX raises where it cannot be compiled."""
        trace = self._traces.use((kind, len(logits)), lambda _: mx.compile(partial(draw, kind)))
        return Draw(*trace(logits, params))


Shape: TypeAlias = tuple[int, tuple[int, ...], bool, tuple[tuple[int, ...], ...]]
"""The shape of a step: its lines, the widths of its tables, whether any row takes an adapter, the
sizes of its lists of work.
"""

Outputs: TypeAlias = tuple[mx.array, mx.array, list[mx.array], list[mx.array]]
"""Logits `[lines, vocabulary]`, the next positions, the pools, the states."""


class CompiledDecode:
    """Computes the forwards of steady steps, by functions that are traced once for each shape.

    `steps` counts steps: "" are those that were compiled, the others are eager and say why. Belongs
    to the thread that made it, as all MLX arrays do.
    """

    def __init__(
        self,
        model: CachedModel,
        faster: Collection[int] = ALL_ROWS,
        wanted_steps: int = WANTED_STEPS,
    ) -> None:
        """`faster`: as `ALL_ROWS`, the numbers of rows at which compiled steps are the faster ones.
        `wanted_steps`: how often a shape must come before it is traced. Raises Unfit for a model
        whose steps cannot be traced.
        """
        layout, storage = model.layout, model.storage
        if model.execution.batching.int_offsets:
            raise Unfit("the model needs positions as Python numbers")
        if any(isinstance(spec, ChunkedCacheSpec) for spec in layout.specs):
            raise Unfit("it attends to chunks")
        self._model = model
        self._faster = faster
        self._wanted_steps = wanted_steps
        self._groups = [
            GroupTables(storage.full, None, None),
            *(
                GroupTables(arena, index, window)
                for index, (window, arena) in enumerate(
                    zip(layout.windows, storage.windows, strict=True)
                )
            ),
        ]
        self._layers = [layer for group in self._groups for layer in group.arena.layers]
        self._weights = TransposedWeights(model.model)
        self._traces = Traces[Shape, Callable[..., Outputs]]()
        self._wanted = Counter[Shape]()
        self._batch: DecodeBatch | None = None
        self._ahead: tuple[DecodeBatch, tuple[int, ...]] | None = None  # what was traced ahead last
        # What it compiles must not refer to it. Else its traces, and the storage of a rehearsal,
        # would stay until the garbage collector comes.
        self._clear = self._new_clear()
        self._refusal: tuple[list[BatchRow], str, int] | None = None
        self._attention_problem = model.execution.attention.problem
        self.problem = ""  # why no step is compiled any more
        self.steps = Counter[str]()

    def forward(
        self, rows: Sequence[BatchRow], tokens: Callable[[int], mx.array]
    ) -> mx.array | None:
        """Logits of one token of each row, `[lines, vocabulary]`, whose first lines are the rows';
        None where the eager path is to compute them. `tokens(lines)`: uint32 `[lines]`, the tokens.
        """
        attention = self._model.execution.attention
        if attention.problem != self._attention_problem:  # what is traced still has it
            self._attention_problem = attention.problem
            self._batch = None
            self.forget_traces()
        try:
            logits, reason = self._forward(rows, tokens)
        except Exception as error:  # a model may raise anything while it is traced
            self.give_up(error)
            logits, reason = None, self.problem
        self.steps[reason] += 1
        if logits is None:
            self._batch = None
        return logits

    def give_up(self, error: Exception) -> None:
        """A compiled step has failed: there will be no others."""
        self.problem = f"{type(error).__name__}: {one_line(error)}"
        logger.warning("decode: eager from now on: %s", self.problem)
        self._batch = None
        self._traces.clear()

    def forget_traces(self) -> None:
        """Drop what is traced, because the arena's planes have changed their shapes."""
        self._traces.clear()
        self._wanted.clear()
        self._ahead = None
        self._clear = self._new_clear()

    def trace_ahead(self) -> None:
        """Trace the shape that the rows of the latest step grow into, if that is near."""
        if (batch := self._batch) is None or self.problem:
            return
        widths = batch.widths_ahead()
        if widths == batch.widths:
            return
        if self._ahead == (batch, widths):
            return
        self._ahead = batch, widths
        with suppress(Exception):  # it is reported when the shape is needed
            work = batch.work_ahead(widths)
            sizes = tuple(() if own is None else own.sizes for own in work)
            shape = batch.size, widths, batch.adapters is not None, sizes
            if shape not in self._traces:
                trace = self._traces.use(shape, self._new_trace)
                tables = [mx.zeros((batch.size, width), mx.uint32) for width in widths]
                tokens = mx.zeros(batch.size, mx.uint32)
                self._call(trace, batch, tokens, tables, work, self._slots(batch))

    def _forward(
        self, rows: Sequence[BatchRow], tokens: Callable[[int], mx.array]
    ) -> tuple[mx.array | None, str]:
        if self.problem:
            return None, self.problem
        if min(len(rows), max(ALL_ROWS)) not in self._faster:
            return None, "eager steps are faster for this number of rows"
        batch = self._batch
        if batch is None or not batch.follows(rows):
            if (reason := self._refused(rows)) is not None:
                return None, reason
            lines = len(rows) if self._model.layout.states else row_bucket(len(rows))
            if reason := self._unfit(rows, lines):
                self._refusal = list(rows), reason, REFUSED_STEPS
                return None, reason
            adapters = self._adapters(rows, lines)
            attention = self._model.execution.attention
            batch = self._batch = DecodeBatch(rows, lines, self._groups, adapters, attention)
        shape = batch.size, batch.widths, batch.adapters is not None, batch.work_sizes
        if (trace := self._trace(shape)) is None:
            return None, "a shape that is new"
        if any(batch.begun):
            self._clear_begun(batch.begun)
        slots = self._slots(batch)
        logits, positions, pools, states = self._call(
            trace, batch, tokens(batch.size), batch.tables, batch.work, slots
        )
        self._put_pools(pools)
        batch.move(positions)
        if slots:
            self._model.storage.states.write(slots, states)
        return logits, ""

    def _refused(self, rows: Sequence[BatchRow]) -> str | None:
        """Why these rows were refused at most REFUSED_STEPS steps ago; None if they were not."""
        if self._refusal is None or self._refusal[0] != rows:
            return None
        _, reason, steps = self._refusal
        self._refusal = (self._refusal[0], reason, steps - 1) if steps > 1 else None
        return reason

    def _call(
        self,
        trace: Callable[..., Outputs],
        batch: DecodeBatch,
        tokens: mx.array,
        tables: list[mx.array],
        work: Sequence[ListedWork | None],
        slots: Sequence[SlotId],
    ) -> Outputs:
        return trace(
            tokens,
            batch.positions,
            batch.advance,
            batch.deltas,
            tables,
            batch.first_keys,
            [[] if own is None else list(own.arrays) for own in work],
            [] if batch.adapters is None else [batch.adapters],
            self._pools(),
            self._model.storage.states.read(slots) if slots else [],
        )

    def _unfit(self, rows: Sequence[BatchRow], lines: int) -> str:
        """Why rows are better computed eagerly than in that many lines; "" if they are not."""
        if len(rows) == 1 or self._model.in_place_tokens:
            return ""
        attention, full = self._model.execution.attention, self._groups[0]
        tables = [full.line(row) for row in rows]
        block_size, n_blocks = full.arena.block_size, sum(map(len, tables))
        read_blocks = lines * width_bucket(max(map(len, tables)))
        if read_blocks * block_size > self._model.most_keys:
            return "too many keys for one forward"
        spare = min(PADDING_BLOCKS, attention.padding_keys / block_size)
        if read_blocks - n_blocks > spare + n_blocks // 8:
            return "rows of unlike lengths"
        if attention.shares_prefixes(pad_tables(tables, full.arena.blank)):
            return "rows share a long prefix"
        return ""

    def _adapters(self, rows: Sequence[BatchRow], lines: int) -> mx.array | None:
        """Which adapter each line takes, `[lines]`; None where no row takes any."""
        names = [row.tables.adapter for row in rows]
        names += names[-1:] * (lines - len(rows))
        return self._model.execution.adapters.indices_of(names)

    def _slots(self, batch: DecodeBatch) -> list[SlotId]:
        """The slots of the rows' recurrent states; none where the model keeps no states."""
        if not self._model.layout.states:
            return []
        return [SlotId(int(row.tables.ids(-1)[0])) for row in batch.rows]

    def _trace(self, shape: Shape) -> Callable[..., Outputs] | None:
        """The function of a shape. None while it has not been wanted often enough."""
        if shape not in self._traces:
            self._wanted[shape] += 1
            if self._wanted[shape] < self._wanted_steps:
                return None
        return self._traces.use(shape, self._new_trace)

    def _new_trace(self, shape: Shape) -> Callable[..., Outputs]:
        this, (lines, widths, _, sizes) = weakref.proxy(self), shape
        model, groups = self._model, self._groups
        batching, attention = model.execution.batching, model.execution.attention
        prepared = [
            attention.prepare_decode(lines, width, group.arena, group.window, own_sizes)
            if group.arena.is_attended
            else None
            for group, width, own_sizes in zip(groups, widths, sizes, strict=True)
        ]

        def step(
            tokens: mx.array,
            positions: mx.array,
            advance: mx.array,
            deltas: mx.array,
            tables: list[mx.array],
            first_keys: list[mx.array],
            work: list[list[mx.array]],
            adapters: list[mx.array],
            pools: list[mx.array],
            states: list[mx.array],
        ) -> Outputs:
            images = model.execution.images
            rotary = positions if images is None or images.merge is None else positions + deltas
            rows = [
                DecodeRows(
                    group.arena,
                    table,
                    positions,
                    rotary,
                    None if group.window is None else firsts,
                )
                for group, table, firsts in zip(groups, tables, first_keys, strict=True)
            ]
            forwards = {
                group.window: ArenaForward([own], batching.stands_in, batching.masks_by_head)
                for group, own in zip(groups, rows, strict=True)
            }
            attentions = {
                group.window: [None if prepare is None else prepare(of, own)]
                for group, prepare, of, own in zip(groups, prepared, rows, work, strict=True)
            }
            adapted = model.execution.adapters.using(adapters[0] if adapters else None)
            with this._holding(pools), model.rotary(), this._weights.used(lines), adapted:
                views = ForwardViews(model.layout, forwards, attentions, states)
                ids = tokens.astype(mx.int32)[:, None]
                logits: mx.array = model.model(ids, cache=views.trees)
                logits = logits.reshape(lines, -1)
                return logits, positions + advance, this._pools(), views.states()

        return mx.compile(step)

    def _clear_begun(self, begun: Sequence[Sequence[int]]) -> None:
        """Zero the blocks that the rows begin, which may hold NaN from an earlier use."""
        most = 1 << (len(begun[0]) - 1).bit_length()
        blocks = [
            mx.array([*ids, *[group.arena.scratch] * (most - len(ids))], mx.uint32)
            for group, ids in zip(self._groups, begun, strict=True)
        ]
        self._put_pools(self._clear(self._pools(), blocks))  # no name is bound to the pools

    def _new_clear(self) -> Callable[..., list[mx.array]]:
        return mx.compile(partial(type(self)._cleared, weakref.proxy(self)))

    def _cleared(self, pools: list[mx.array], blocks: list[mx.array]) -> list[mx.array]:
        with self._holding(pools):
            for group, ids in zip(self._groups, blocks, strict=True):
                group.arena.clear(ids)
            return self._pools()

    def _pools(self) -> list[mx.array]:
        return [plane for layer in self._layers for plane in layer.planes if plane.size]

    def _put_pools(self, pools: list[mx.array]) -> None:
        """Make these the arenas' planes, and empty the list: MLX copies a pool at its next write if
        another reference to it is left.
        """
        pools.reverse()
        for layer in self._layers:
            layer.planes = tuple(pools.pop() if plane.size else plane for plane in layer.planes)

    @contextmanager
    def _holding(self, pools: list[mx.array]) -> Iterator[None]:
        """Within the context the arenas hold these arrays, which are being traced."""
        before = [layer.planes for layer in self._layers]
        self._put_pools(pools)
        try:
            yield
        finally:
            for layer, planes in zip(self._layers, before, strict=True):
                layer.planes = planes
