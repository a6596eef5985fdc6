"""Low-rank adapters of a model's projections, of which each row of a forward takes one, or none.

What an adapter adds to a projection `x W` is `x A B`, with the scale in B. A projection that any
adapter changes has the matrices of all of them, stacked, and gathers its rows' own.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

NO_ADAPTER = ""


@dataclass(frozen=True, slots=True)
class LowRank:
    """What an adapter adds to one projection: `a`, `[inputs, rank]`, and `b`, `[rank, outputs]`."""

    a: mx.array
    b: mx.array


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter under its name: what it adds, by the paths of the projections in the model."""

    name: str
    fingerprint: str  # changes with its files
    added: Mapping[str, LowRank]


class RowAdapters:
    """Says which adapter each row of a forward takes. `names` are those that there are."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        self.names = tuple(names)
        self._index = {name: index for index, name in enumerate((NO_ADAPTER, *names))}
        self.indices: mx.array | None = None  # [rows], 0 is none; None: no row takes any

    @contextmanager
    def of(self, rows: Sequence[str]) -> Iterator[None]:
        """Meanwhile the rows of what the model is given take the adapters of these names.

        Rows that all take the same one are multiplied as one.
        """
        with self.using(self.indices_of(rows if len(set(rows)) > 1 else rows[:1])):
            yield

    def indices_of(self, rows: Sequence[str]) -> mx.array | None:
        """For `using`; None where no row takes any."""
        if not any(rows):
            return None
        return mx.array([self._index[name] for name in rows], mx.uint32)

    @contextmanager
    def using(self, indices: mx.array | None) -> Iterator[None]:
        """Meanwhile the rows take the adapters with these indices, `[rows]`, or `[1]` for all."""
        self.indices = indices
        try:
            yield
        finally:
            self.indices = None


def install(model: Module, adapters: Sequence[Adapter]) -> RowAdapters:
    """Let the projections that adapters change ask which of them each row takes.

    Where no row takes any, and for what no adapter changes, the model computes what it did before.
    """
    rows = RowAdapters([adapter.name for adapter in adapters])
    modules = dict(model.named_modules())
    for path in {path: None for adapter in adapters for path in adapter.added}:
        projection = modules[path]
        of_each = [adapter.added.get(path) for adapter in adapters]
        projection.adapters_a, projection.adapters_b = _stacked(of_each)
        projection.__class__ = _adapted(type(projection), rows)
    return rows


def _stacked(of_each: Sequence[LowRank | None]) -> tuple[mx.array, mx.array]:
    """A `[adapters + 1, inputs, rank]` and B `[adapters + 1, rank, outputs]`, of the highest rank.

    The first is that of rows which take none: zeros, as all that is padded, and what an adapter
    does not change. In float32, in which they were trained: MLX gathers no others on a CPU.
    """
    given = [added for added in of_each if added is not None]
    inputs, outputs = given[0].a.shape[0], given[0].b.shape[1]
    rank = max(added.a.shape[1] for added in given)
    nothing = LowRank(mx.zeros((inputs, rank)), mx.zeros((rank, outputs)))
    all_of = [nothing, *(nothing if added is None else _padded(added, rank) for added in of_each)]
    return mx.stack([added.a for added in all_of]), mx.stack([added.b for added in all_of])


def _padded(added: LowRank, rank: int) -> LowRank:
    missing = rank - added.a.shape[1]
    a, b = added.a.astype(mx.float32), added.b.astype(mx.float32)
    return LowRank(mx.pad(a, [(0, 0), (0, missing)]), mx.pad(b, [(0, missing), (0, 0)]))


def _adapted(kind: type[Any], rows: RowAdapters) -> type[Any]:
    """The same class, whose instances add what the adapters of their rows do."""

    class Adapted(kind):  # type: ignore[misc]
        def __call__(self, x: mx.array) -> mx.array:
            projected: mx.array = super().__call__(x)
            if rows.indices is None:
                return projected
            by_row = x.reshape(rows.indices.size, -1, x.shape[-1])
            low = mx.gather_mm(by_row, self.adapters_a, rhs_indices=rows.indices)
            added = mx.gather_mm(low, self.adapters_b, rhs_indices=rows.indices)
            return projected + added.reshape(projected.shape).astype(projected.dtype)

    return Adapted
