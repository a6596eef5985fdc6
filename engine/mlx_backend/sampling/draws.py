"""One token for each row of logits: the likeliest, or a random one of those that the cuts leave.

A drawn row is an inversion of its cumulative distribution. All functions are lazy and take each row
for itself; `peaks` [rows, 1] are the largest logits.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import mlx.core as mx
import numpy as np

from engine.mlx_backend.sampling.exponential import exp2
from engine.mlx_backend.sampling.grid import Grid
from engine.mlx_backend.sampling.row import SamplingRow
from engine.types import SamplingParams

HALVINGS = 4
PROPOSALS = 2**HALVINGS - 1
"""Draws of one round, so many that the nucleus is told from the rest in HALVINGS steps."""


@dataclass(frozen=True, slots=True)
class Likeliest:
    """Greedy rows. Of equal logits the token with the lowest id."""

    def choose(
        self, grid: Grid, logits: mx.array, peaks: mx.array, rows: Sequence[SamplingRow]
    ) -> mx.array:
        return grid.find(logits, peaks, mx.array(0))


@dataclass(frozen=True, slots=True)
class Ranked:
    """Rows with a top_k of at most `width`: that many logits are sorted, and no others."""

    width: int

    def choose(
        self, grid: Grid, logits: mx.array, peaks: mx.array, rows: Sequence[SamplingRow]
    ) -> mx.array:
        largest, _ = grid.largest(logits, self.width)
        ranked = -mx.sort(-largest, axis=1)
        weights = _weights(ranked, peaks, rows)
        top_k = mx.array([[row.params.top_k] for row in rows])
        weights = mx.where(mx.arange(ranked.shape[1]) < top_k, weights, 0)
        mass = mx.cumsum(weights, axis=1)
        # A token stays while those above it hold less than top_p; 1 is off, whatever the rounding.
        top_p = _column(p if (p := row.params.top_p) < 1 else math.inf for row in rows)
        n_kept = mx.maximum((mass - weights < top_p * mass[:, -1:]).sum(axis=1, keepdims=True), 1)
        smallest = mx.take_along_axis(ranked, n_kept - 1, axis=1)
        stays = (ranked >= smallest) & (weights >= _min_p(rows))
        rank = _invert(weights * stays, _uniforms(rows, 1))
        value = mx.take_along_axis(ranked, rank, axis=1)
        return grid.find(logits, value, rank - (ranked > value).sum(axis=1, keepdims=True))


@dataclass(frozen=True, slots=True)
class Whole:
    """Rows without top_k; with `rounds` they have a top_p.

    The nucleus is not searched for: tokens are drawn from all, and the first that is inside is a
    draw from the nucleus. Of the draws of a round, sorted, those inside are found by halving, where
    each step sums up what is likelier than one of them. If none is inside, the next round draws
    above the likeliest of them, as FlashInfer's sampler does. A row that is never
    inside takes its likeliest token.
    """

    rounds: int

    def choose(
        self, grid: Grid, logits: mx.array, peaks: mx.array, rows: Sequence[SamplingRow]
    ) -> mx.array:
        weights = _weights(logits, peaks, rows)
        nucleus = _column(row.params.top_p for row in rows) * grid.totals(weights)
        if any(row.params.min_p > 0 for row in rows):
            weights = weights * (weights >= _min_p(rows))
        if not self.rounds:
            return _propose(grid, weights, _uniforms(rows, 2))[0][:, 0]
        chosen = grid.find(logits, peaks, mx.array(0))[:, None]
        is_chosen = mx.zeros_like(peaks) > 0
        for uniforms in _uniforms(rows, 2 * PROPOSALS * self.rounds).split(self.rounds, axis=1):
            tokens, their_weights = _propose(grid, weights, uniforms)
            ranked = -mx.sort(-their_weights, axis=1)
            n_inside = _count_inside(grid, weights, ranked, nucleus)
            smallest = mx.take_along_axis(ranked, mx.maximum(n_inside, 1) - 1, axis=1)
            first = mx.argmax(their_weights >= smallest, axis=1, keepdims=True)
            token = mx.take_along_axis(tokens, first, axis=1)
            chosen = mx.where((n_inside > 0) & ~is_chosen, token, chosen)
            is_chosen = is_chosen | (n_inside > 0)
            weights = weights * (weights > ranked[:, :1])
        return chosen[:, 0]


Choice: TypeAlias = Likeliest | Ranked | Whole

GREEDY_BELOW = 1e-5
"""Temperatures under this are 0: the quotients would be beyond float32's precision anyway."""


def choice_for(params: SamplingParams) -> Choice:
    """How a row with such parameters gets its token; rows with the same choice go together."""
    if params.temperature < GREEDY_BELOW or params.top_p == 0:
        return Likeliest()
    if params.top_k > 0:
        return Ranked(1 << (params.top_k - 1).bit_length())
    return Whole(_rounds(params.top_p))


def _rounds(top_p: float) -> int:
    """So many that a row is without a draw from its nucleus less than once in ten million times.

    A draw is inside with a chance of at least top_p. Where none of a round is, a sixteenth of what
    was outside is left to the next, on average.
    """
    if top_p >= 1:
        return 0
    if (1 - top_p) ** PROPOSALS <= 1e-7:
        return 1
    return 1 + math.ceil(-math.log2(max(top_p, 1e-7)) / 2.4)


def _propose(grid: Grid, weights: mx.array, uniforms: mx.array) -> tuple[mx.array, mx.array]:
    """Tokens drawn by their weights [rows, vocab], and the weights of these: [rows, n] each.

    For each of them the `uniforms` [rows, 2 n] have one number for the column and one for the
    token in it.
    """
    for_columns, for_strips = uniforms[:, 0::2], uniforms[:, 1::2, None]
    columns = _invert(grid.fold(weights).sum(axis=1), for_columns)
    inside = grid.column(weights, columns).transpose(0, 2, 1)
    strips = _invert(inside, for_strips)
    chosen = mx.take_along_axis(inside, strips, axis=2)
    return grid.tokens(strips[..., 0], columns), chosen[..., 0]


def _invert(weights: mx.array, uniforms: mx.array) -> mx.array:
    """Places drawn by weights [..., n] with uniforms in (0, 1], [..., draws] each.

    A place without weight is never drawn, however the sums are rounded, and none outside.
    """
    mass = mx.cumsum(weights, axis=-1)
    wanted = (uniforms * mass[..., -1:])[..., None]
    reached = mx.where(weights > 0, mass, -1)[..., None, :]
    return mx.argmax(mx.minimum(reached, wanted), axis=-1)  # the first that reaches what is wanted


def _count_inside(grid: Grid, weights: mx.array, ranked: mx.array, nucleus: mx.array) -> mx.array:
    """How many of the PROPOSALS weights `ranked`, the largest first, have less above them than
    the nucleus holds: [rows, 1].
    """
    total = grid.totals(weights)
    n_inside = mx.zeros(nucleus.shape, dtype=mx.int32)
    for step in (2**halving for halving in reversed(range(HALVINGS))):
        bound = mx.take_along_axis(ranked, n_inside + (step - 1), axis=1)
        n_above = (weights > bound).sum(axis=1, keepdims=True)
        above = total - (grid.totals(mx.minimum(weights, bound)) - n_above * bound)
        n_inside = mx.where(above < nucleus, n_inside + step, n_inside)
    return n_inside


def _uniforms(rows: Sequence[SamplingRow], count: int) -> mx.array:
    return mx.array(np.stack([row.uniforms(count) for row in rows]))


def _weights(logits: mx.array, peaks: mx.array, rows: Sequence[SamplingRow]) -> mx.array:
    """How likely each is beside the likeliest, at the rows' temperatures; for -inf 0."""
    return exp2(
        (logits - peaks) * _column(math.log2(math.e) / row.params.temperature for row in rows)
    )


def _min_p(rows: Sequence[SamplingRow]) -> mx.array:
    return _column(row.params.min_p for row in rows)


def _column(values: Iterable[float]) -> mx.array:
    return mx.array(list(values), dtype=mx.float32)[:, None]
