"""What the two passes of paged attention take and return, on a device or as MLX operations."""

from abc import ABC, abstractmethod
from typing import NamedTuple

import mlx.core as mx

from engine.mlx_backend.gpu.kind import Kind
from engine.mlx_backend.gpu.work_units import MIN_ARRAY, WorkUnits
from engine.mlx_backend.kv.arena import LayerArena


class UnitArrays(NamedTuple):
    """The arrays of `WorkUnits` on the device. They may be inputs of a trace."""

    units: mx.array
    order: mx.array
    first_parts: mx.array
    parts: mx.array

    @classmethod
    def of(cls, work: WorkUnits) -> "UnitArrays":
        """The arrays of a list."""
        return cls(*map(mx.array, (work.units, work.order, work.first_parts, work.parts)))


class StepArrays(NamedTuple):
    """What the layers of an arena with equal lists share in a step: see `step_arrays`, which pads
    arrays to MIN_ARRAY numbers.

    `places`, `[rows, entries]`, uint32: where the blocks of each row's table are in the planes.
    `last_seen`, `[rows * width]`, int32: the last position that each token sees. `first_keys`,
    `[rows]`, int32: the position of the first key of each row's table. `n_partials`: see
    `WorkUnits`.
    """

    places: mx.array
    last_seen: mx.array
    first_keys: mx.array
    work: UnitArrays
    n_partials: int


def step_arrays(
    places: mx.array,
    last_seen: mx.array,
    first_keys: mx.array | None,
    work: UnitArrays,
    n_partials: int,
) -> StepArrays:
    """The arrays of a step, of these or of traced ones. `places`: `Arena.place` of a block table,
    `[rows, entries]`. `last_seen`: `[rows, width]`. `first_keys`: `[rows]`; None: all are 0.
    """
    rows, entries = places.shape
    if places.size < MIN_ARRAY:
        places = mx.pad(places, [(0, 0), (0, -(-MIN_ARRAY // rows) - entries)])
    first = mx.zeros(rows, mx.int32) if first_keys is None else first_keys
    return StepArrays(
        places.astype(mx.uint32),
        padded(last_seen, mx.int32),
        padded(first, mx.int32),
        work,
        n_partials,
    )


STATS = 2
"""Numbers of a partial result in addition to its sums."""


class Partials(NamedTuple):
    """Partial results of queries over some of their keys, float32.

    `weighted`, `[partials, kv_heads, value_dim]`: sums of values, each weighted with 2 to the power
    of its score, less the largest. `stats`, `[partials, kv_heads, STATS]`: the largest score, and
    the sum of weights. Those that no work unit writes hold anything.
    """

    weighted: mx.array
    stats: mx.array


class PagedKernel(ABC):
    """The attention of a kind of layer to blocks in place, in two passes."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind

    @abstractmethod
    def partials(self, queries: mx.array, layer: LayerArena, step: StepArrays) -> Partials:
        """The first pass: what each work unit finds.

        `queries`, `[rows, heads, width, key_dim]`: not scaled, rotated as the layer's keys are.
        """

    @abstractmethod
    def merge(
        self, partials: Partials, step: StepArrays, queries: mx.array, sinks: mx.array | None
    ) -> mx.array:
        """The second pass: the output, `[rows, heads, width, value_dim]`, in the dtype of the
        queries, which give the shape alone. A row without partial results is zero.

        `sinks`, `[heads]`, where the kind has them.
        """

    def attend(
        self, queries: mx.array, layer: LayerArena, step: StepArrays, sinks: mx.array | None = None
    ) -> mx.array:
        """Attention of a step's queries to the keys that each of them sees; see both passes."""
        return self.merge(self.partials(queries, layer, step), step, queries, sinks)


def padded(array: mx.array, dtype: mx.Dtype) -> mx.array:
    """A flat array of at least MIN_ARRAY numbers."""
    flat = array.astype(dtype).reshape(-1)
    return mx.pad(flat, (0, MIN_ARRAY - flat.size)) if flat.size < MIN_ARRAY else flat
