"""Paged attention as MLX operations, for devices that the kernel is not compiled for.

It computes the same work units as the kernel, from the same arrays, and so stands in for it where
the rest of the engine is tested on a CPU. It serves nobody: it gathers what each unit reads.
"""

import math

import mlx.core as mx

from engine.mlx_backend.gpu.kernel import PagedKernel, Partials, StepArrays
from engine.mlx_backend.kv.arena import LayerArena

HIDDEN = -1e30
"""A score that no key has. It is finite, so that differences are numbers."""


class StandInKernel(PagedKernel):
    """The kernel of a kind as MLX operations."""

    def partials(self, queries: mx.array, layer: LayerArena, step: StepArrays) -> Partials:
        """The first pass; see `PagedKernel.partials`."""
        kind = self.kind
        of_row = kind.group * queries.shape[2]
        columns = step.work.units.T
        rows, n_rows, entry, n_entries, base, first_query, query_simds = columns[:7]
        line = step.work.order[rows]

        nth = mx.arange(kind.tile_queries)
        query = first_query[:, None] + nth
        is_query = (query < n_rows[:, None] * of_row) & (nth < query_simds[:, None] * kind.tile)
        listed = mx.where(is_query, rows[:, None] + query // of_row, 0)
        own_line, own = step.work.order[listed], query % of_row  # [units, queries]

        before = step.first_keys[line] + entry * kind.block_size
        last = step.last_seen[own_line * queries.shape[2] + own % queries.shape[2]]
        keys, values = self._read(layer, step, line, entry)  # [units, kv_heads, keys, dim]
        n_keys = mx.arange(keys.shape[2])
        positions = (before[:, None] + n_keys)[:, None]
        seen = (positions <= last[..., None]) & is_query[..., None]
        seen = seen & (n_keys < n_entries[:, None] * kind.block_size)[:, None]
        if kind.window:
            seen = seen & (positions > last[..., None] - kind.window)
        # What no query sees may be NaN.
        is_read = seen.any(axis=1)[:, None, :, None]
        keys, values = mx.where(is_read, keys, 0), mx.where(is_read, values, 0)

        by_query = queries.reshape(-1, kind.kv_heads, of_row, kind.key_dim).swapaxes(1, 2)
        by_query = by_query.reshape(-1, kind.kv_heads, kind.key_dim).astype(mx.float32)
        scaled = by_query[own_line * of_row + own].swapaxes(1, 2) * (kind.scale * math.log2(math.e))
        scores = mx.where(seen[:, None], scaled @ keys.swapaxes(-1, -2), HIDDEN)
        peak = scores.max(axis=-1, keepdims=True)
        weights = mx.where(seen[:, None], _exp2(scores - peak), 0)
        stats = mx.concatenate([peak, weights.sum(axis=-1, keepdims=True)], axis=-1)

        to = mx.where(is_query, base[:, None] + query, step.n_partials).reshape(-1)
        return Partials(*(_scattered(to, step.n_partials, of) for of in (weights @ values, stats)))

    def _read(
        self, layer: LayerArena, step: StepArrays, line: mx.array, entry: mx.array
    ) -> tuple[mx.array, mx.array]:
        """K and V of the units' entries, in float32, and of those after them."""
        kind, width = self.kind, step.places.shape[1]
        entries = entry[:, None] + mx.arange(min(kind.most_entries, width))
        places = step.places[line[:, None], mx.minimum(entries, width - 1)][:, None]
        heads = places * kind.kv_heads + mx.arange(kind.kv_heads, dtype=mx.uint32)[:, None]
        keys, values = layer.read((heads, heads + layer.values_at))
        return keys.astype(mx.float32), values.astype(mx.float32)

    def merge(
        self, partials: Partials, step: StepArrays, queries: mx.array, sinks: mx.array | None
    ) -> mx.array:
        """The second pass; see `PagedKernel.merge`."""
        kind, (rows, heads, width, _) = self.kind, queries.shape
        of_row, (_, _, first_parts, parts) = kind.group * width, step.work
        # Which row each part belongs to: [rows, parts]. What is before a row's first part is not
        # its own, nor what is after its last.
        index = mx.arange(parts.size)
        first, stop = first_parts[:rows, None], first_parts[1 : rows + 1, None]
        is_own = ((index >= first) & (index < stop))[:, :, None, None]
        places = mx.minimum(parts[:, None] + mx.arange(of_row), step.n_partials - 1)
        peaks, totals = mx.moveaxis(partials.stats[places], -1, 0)  # [parts, of_row, kv_heads]
        peaks = mx.where(is_own, peaks, HIDDEN)  # [rows, parts, of_row, kv_heads]
        peak = peaks.max(axis=1, keepdims=True)
        if kind.has_sinks:
            assert sinks is not None
            by_head = sinks.astype(mx.float32).reshape(kind.kv_heads, kind.group) * math.log2(
                math.e
            )
            of_sinks = mx.repeat(by_head, width, axis=1).T[None, None]
            peak = mx.maximum(peak, of_sinks)
        weights = mx.where(is_own, _exp2(peaks - peak), 0)
        total = (weights * totals).sum(axis=1)
        if kind.has_sinks:
            total = total + _exp2(of_sinks - peak)[:, 0]
        by_query = weights.transpose(2, 3, 0, 1)  # [of_row, kv_heads, rows, parts]
        output = by_query @ partials.weighted[places].transpose(1, 2, 0, 3)
        output = output.transpose(2, 1, 0, 3)  # [rows, kv_heads, of_row, value_dim]
        total = total.swapaxes(1, 2)[..., None]
        output = mx.where(total > 0, output / mx.where(total > 0, total, 1), 0)
        return output.reshape(rows, heads, width, kind.value_dim).astype(queries.dtype)


def _exp2(x: mx.array) -> mx.array:
    return mx.exp(x * math.log(2))


def _scattered(to: mx.array, n: int, of: mx.array) -> mx.array:
    """`[n, kv_heads, dim]` with `of`, `[units, kv_heads, queries, dim]`, at `to`; what goes to `n`
    is left out. The rest is zero.
    """
    kv_heads, dim = of.shape[1], of.shape[3]
    whole = mx.zeros((n + 1, kv_heads, dim), of.dtype)
    return whole.at[to].add(of.swapaxes(1, 2).reshape(-1, kv_heads, dim))[:n]
