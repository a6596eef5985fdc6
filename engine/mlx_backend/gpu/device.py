"""Paged attention as a kernel that MLX compiles for a Metal or CUDA device."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from engine.mlx_backend.gpu.kernel import STATS, PagedKernel, Partials, StepArrays, padded
from engine.mlx_backend.gpu.kind import MERGE_THREADS, WARP, Kind
from engine.mlx_backend.gpu.source import (
    CUDA,
    INPUTS,
    MERGE_INPUTS,
    MERGE_OUTPUTS,
    METAL,
    OUTPUTS,
    header,
)
from engine.mlx_backend.gpu.work_units import MIN_ARRAY
from engine.mlx_backend.kv.arena import LayerArena


class DeviceKernel(PagedKernel):
    """The kernel of a kind. MLX compiles it when it is first evaluated, and raises RuntimeError
    there, or ends the process, where it cannot.
    """

    def __init__(self, kind: Kind) -> None:
        super().__init__(kind)
        make, dialect = (
            (mx.fast.cuda_kernel, CUDA) if mx.cuda.is_available() else (mx.fast.metal_kernel, METAL)
        )
        before = header(dialect, kind.defines())
        self._partials: Any = make(
            f"{kind.name}_partials", INPUTS, OUTPUTS, dialect.partials, before
        )
        self._merge: Any = make(
            f"{kind.name}_merge", MERGE_INPUTS, MERGE_OUTPUTS, dialect.merge, before
        )

    def partials(self, queries: mx.array, layer: LayerArena, step: StepArrays) -> Partials:
        """The first pass; see `PagedKernel.partials`."""
        kind, units = self.kind, step.work.units
        keys, values = _planes(layer.key_planes), _planes(layer.value_planes)
        by_head = step.n_partials, kind.kv_heads
        threads = kind.simds * WARP
        weighted, stats = self._partials(
            inputs=[
                queries,
                *keys,
                *values,
                step.places,
                units,
                step.work.order,
                step.last_seen,
                step.first_keys,
                _limits(step.places.shape[1], layer.values_at * kind.block_size, queries.shape[2]),
            ],
            grid=(len(units) * threads, kind.kv_heads, 1),
            threadgroup=(threads, 1, 1),
            output_shapes=[(*by_head, kind.value_dim), (*by_head, STATS)],
            output_dtypes=[mx.float32, mx.float32],
        )
        return Partials(weighted, stats)

    def merge(
        self, partials: Partials, step: StepArrays, queries: mx.array, sinks: mx.array | None
    ) -> mx.array:
        """The second pass; see `PagedKernel.merge`."""
        rows, heads, width, _ = queries.shape
        of_sinks = step.work.parts if sinks is None else padded(sinks, mx.float32)
        found: list[mx.array] = self._merge(
            inputs=[
                *partials,
                step.work.first_parts,
                step.work.parts,
                of_sinks,
                _limits(step.places.shape[1], 0, width),
            ],
            grid=(rows * heads * width * MERGE_THREADS, 1, 1),
            threadgroup=(MERGE_THREADS, 1, 1),
            output_shapes=[(rows, heads, width, self.kind.value_dim)],
            output_dtypes=[queries.dtype],
        )
        return found[0]


def _planes(planes: Sequence[mx.array]) -> tuple[mx.array, mx.array]:
    """The numbers or codes of K or of V, and their scales; without scales, anything."""
    return planes[0], planes[-1]


def _limits(table_width: int, values_at: int, tokens: int) -> mx.array:
    """The input of that name: it changes between steps and layers without a new kernel."""
    numbers = np.zeros(MIN_ARRAY, np.int32)
    numbers[:3] = table_width, values_at, tokens
    return mx.array(numbers)
