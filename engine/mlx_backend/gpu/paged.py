"""The attention `paged`: decodes, with drafts too, read the arena's blocks in place, with a kernel
for Metal and CUDA. Blocks that several rows share are read once for all of them.

It covers windows, sinks and all stored formats. Longer chunks are gathered. On a CPU the same work
is done by MLX operations, which gather what each unit reads: for tests.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import NamedTuple, TypeAlias

import mlx.core as mx
import numpy as np

from engine.mlx_backend.gpu.device import DeviceKernel
from engine.mlx_backend.gpu.kernel import (
    STATS,
    PagedKernel,
    StepArrays,
    UnitArrays,
    step_arrays,
)
from engine.mlx_backend.gpu.kind import Kind, Uncovered, kind_of
from engine.mlx_backend.gpu.stand_in import StandInKernel
from engine.mlx_backend.gpu.work_units import (
    MIN_SAVED_BLOCKS,
    MIN_UNIT_KEYS,
    UNIT_FIELDS,
    WorkUnits,
    make_units,
    most_partials,
    next_power,
)
from engine.mlx_backend.kv.arena import Arena, LayerArena
from engine.mlx_backend.kv.shape import LayerShape
from engine.mlx_backend.model.attention import (
    SHORT_TOKENS,
    Attention,
    BlockAttention,
    ListedWork,
    PrepareDecodeRows,
    ShortRowAttention,
)
from engine.mlx_backend.model.rows import BlockTable, Counts, RowGroup


class UnitKey(NamedTuple):
    """What a list of work depends on: the layers of an arena with equal keys share one."""

    kv_heads: int
    group: int
    tile: int
    simds: int

    @classmethod
    def of(cls, kind: Kind) -> "UnitKey":
        return cls(kind.kv_heads, kind.group, kind.tile, kind.simds)


class ListSize(NamedTuple):
    """The size of a list of work: its units and its partial results for each query of a KV head,
    padded to the same power of two.
    """

    key: UnitKey
    n: int

    @property
    def n_partials(self) -> int:
        return self.n * self.key.group


KindArguments: TypeAlias = tuple[LayerShape, int, int, mx.Dtype, float, int | None, bool, int]
"""Those of `kind_of`."""

StepsOf: TypeAlias = Callable[[UnitKey, Kind], StepArrays | None]
"""The list of a step's work in layers of a kind; None where there is none."""


class PagedAttention(ShortRowAttention):
    """Rows of up to SHORT_TOKENS tokens read blocks in place, except in layers that the kernel does
    not cover.
    """

    name = "paged"
    in_place_tokens = SHORT_TOKENS

    def __init__(
        self,
        gather: Attention,
        adapt: Callable[[Kind], Kind],
        min_saved_blocks: int = MIN_SAVED_BLOCKS,
    ) -> None:
        """`adapt` changes how the work of a kind is shared out. `min_saved_blocks`: a prefix that
        saves fewer block reads is read by each row alone.
        """
        super().__init__(gather, gather.padding_keys)
        self.gathered_copies = gather.gathered_copies
        self._adapt = adapt
        self._min_saved_blocks = min_saved_blocks
        self._kinds = dict[KindArguments, Kind | None]()
        self._kernels = dict[Kind, PagedKernel]()

    def prepare_short(self, group: RowGroup, window: int | None) -> BlockAttention | None:
        return PagedRows(self, group, partial(self._list_step, group))

    def prepare_decode(
        self, rows: int, width: int, arena: Arena, window: int | None, sizes: tuple[int, ...]
    ) -> PrepareDecodeRows | None:
        if not sizes:
            return None

        def prepare(group: RowGroup, work: Sequence[mx.array]) -> BlockAttention:
            arrays = iter(work)
            steps = {
                size.key: _step_arrays(
                    group, UnitArrays(*islice(arrays, len(UnitArrays._fields))), size.n_partials
                )
                for size in _parsed(sizes)
            }
            return PagedRows(self, group, lambda key, kind: steps.get(key))

        return prepare

    def list_work(
        self, table: BlockTable, n_blocks: Counts, arena: Arena, window: int | None
    ) -> ListedWork | None:
        rows, width = table.shape
        covered = [kind for kind in self._kinds_of(arena) if kind is not None]
        kinds = {UnitKey.of(kind): kind for kind in covered}
        if not kinds:
            return None
        most, min_saved = np.full(rows, width, np.int32), rows * width
        if window is None:
            # Rows grow alike, until the longest fills the table. A window's begin where others end,
            # so that rows have the same blocks at unlike places: none are shared.
            most = np.minimum(n_blocks + (width - n_blocks.max() + 1), width).astype(np.int32)
            min_saved = self._min_saved_blocks
        size, shared = arena.block_size, np.zeros(rows, np.int32)
        arrays, sizes = list[mx.array](), list[int]()
        for key, kind in kinds.items():
            units = make_units(
                kind, table, (n_blocks - 1) * size, most * size, 1, min_saved_blocks=min_saved
            )
            n_queries = next_power(-(-units.n_partials // key.group))
            n = max(len(units.units), len(units.parts), n_queries)
            arrays += _padded(units, n)
            sizes += [*key, n]
            np.maximum(shared, _shared_blocks(units, rows), out=shared)
        return ListedWork(arrays, tuple(sizes), shared)

    def partial_bytes(
        self, shape: LayerShape, query_heads: int, block_size: int, n_tokens: int, longest: int
    ) -> int:
        of = shape, block_size, query_heads, shape.key_dtype, 1.0, None, False, SHORT_TOKENS
        if (kind := self.kind(*of)) is None:
            return 0
        n_partials = most_partials(kind, n_tokens, -(-longest // block_size))
        return n_partials * kind.kv_heads * (kind.value_dim + STATS) * mx.float32.size

    def covers(self, arena: Arena) -> bool:
        return all(self._kinds_of(arena))

    def _kinds_of(self, arena: Arena) -> list[Kind | None]:
        """The kinds of an arena's layers in a decode, as far as lists depend on them. None where
        the kernel does not cover a layer, or nothing has attended to it yet.
        """
        size = arena.block_size
        return [
            self.kind(shape, size, heads, shape.key_dtype, 1.0, None, False, 1) if heads else None
            for shape, heads in dict.fromkeys((own.shape, own.query_heads) for own in arena.layers)
        ]

    def kind(self, *of: *KindArguments) -> Kind | None:
        """The kind of a layer; None where the kernel does not cover it. See `kind_of`."""
        if of not in self._kinds:
            try:
                self._kinds[of] = self._adapt(kind_of(*of))
            except Uncovered:
                self._kinds[of] = None
        return self._kinds[of]

    def kernel(self, kind: Kind) -> PagedKernel:
        """The kernel of a kind, or what stands in for it on a CPU."""
        if kind not in self._kernels:
            make = StandInKernel if mx.default_device() == mx.cpu else DeviceKernel
            self._kernels[kind] = make(kind)
        return self._kernels[kind]

    def _list_step(self, group: RowGroup, key: UnitKey, kind: Kind) -> StepArrays:
        """The work of rows in a step of their own."""
        starts = group.starts_host - group.first_positions
        stops = group.stops_host - group.first_positions
        units = make_units(
            kind,
            group.host_table,
            starts,
            stops,
            group.length,
            min_saved_blocks=self._min_saved_blocks,
        )
        return _step_arrays(group, UnitArrays.of(units), units.n_partials)


class PagedRows(BlockAttention):
    """Attention of a row group in place. Layers of one arena share the lists of its work."""

    def __init__(self, attention: PagedAttention, group: RowGroup, steps: StepsOf) -> None:
        self._attention = attention
        self._group = group
        self._make = steps
        self._steps = dict[UnitKey, StepArrays | None]()

    def attend(
        self,
        queries: mx.array,
        layer: LayerArena,
        scale: float,
        window: int | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array | None:
        _, heads, width, _ = queries.shape
        has_sinks = sinks is not None
        of = layer.shape, layer.block_size, heads, queries.dtype, scale, window, has_sinks, width
        kind = self._attention.kind(*of)
        if kind is None:
            return None
        key = UnitKey.of(kind)
        if key not in self._steps:
            self._steps[key] = self._make(key, kind)
        if (step := self._steps[key]) is None:
            return None
        return self._attention.kernel(kind).attend(queries, layer, step, sinks)


def as_it_is(kind: Kind) -> Kind:
    """The kind with its work shared out as `kind_of` has it."""
    return kind


def smaller_units(kind: Kind) -> Kind:
    """The kind with units of few blocks: on a CPU each unit gathers the most that any may have."""
    return replace(kind, most_entries=max(MIN_UNIT_KEYS // kind.block_size, 1))


def _step_arrays(group: RowGroup, units: UnitArrays, n_partials: int) -> StepArrays:
    places, seen = group.arena.place(group.table), group.last_seen_array()
    return step_arrays(places, seen, group.first_keys, units, n_partials)


def _padded(work: WorkUnits, n: int) -> UnitArrays:
    """The arrays of a list, with `n` units and parts; units without rows do nothing."""
    units, parts = np.zeros((n, UNIT_FIELDS), np.int32), np.zeros(n, np.int32)
    units[: len(work.units)], parts[: len(work.parts)] = work.units, work.parts
    return UnitArrays(*map(mx.array, (units, work.order, work.first_parts, parts)))


def _parsed(sizes: tuple[int, ...]) -> list[ListSize]:
    fields = len(UnitKey._fields)
    return [
        ListSize(UnitKey(*sizes[at : at + fields]), sizes[at + fields])
        for at in range(0, len(sizes), fields + 1)
    ]


def _shared_blocks(work: WorkUnits, n_rows: int) -> Counts:
    """How many blocks of each row are read for other rows, too, `[n_rows]`: those before the end of
    the last run that it shares.
    """
    shared = np.zeros(n_rows, np.int32)
    columns = work.units.T
    row, rows, entry, entries, _, first_query = columns[:6]
    runs = np.flatnonzero((rows > 1) & (first_query == 0))  # each once, however many tiles it has
    if runs.size:
        counts = rows[runs]
        run = np.repeat(runs, counts)
        nth = np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts)
        np.maximum.at(shared, work.order[row[run] + nth], (entry + entries)[run])
    return shared
