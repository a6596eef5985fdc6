"""One token for each row of logits: the likeliest, or one drawn from those that top_k, top_p and
min_p leave. `choice_for` says which of the four ways below a request's parameters take.

All functions are lazy and take each row for itself; tokens are uint32 [rows, 1].
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import mlx.core as mx
import numpy as np

from engine.mlx_backend.exponential import softmax_exp
from engine.mlx_backend.sampling.edits import SamplingRow
from engine.mlx_backend.sampling.maxima import BLOCK, COLUMNS, DEPTH, Maxima, strips_of, totals
from engine.values.request import SamplingParams

MISSES = 2.0**-23
"""A row without a draw that counts takes its likeliest token: less often than this."""

PROPOSALS = math.ceil(math.log(MISSES) / math.log1p(-1 / DEPTH))

MOST_HALVINGS = 4


@dataclass(frozen=True, slots=True)
class Greedy:
    """The likeliest token; of equal logits the one with the lowest id."""

    def choose(self, maxima: Maxima, rows: Sequence[SamplingRow]) -> mx.array:
        return maxima.likeliest()


@dataclass(frozen=True, slots=True)
class TopK:
    """Rows with a top_k: that many logits are sorted, and no others.

    `most` is a power of two and not less than the top_k of any, so that rows which need few do not
    wait for those that need many.
    """

    most: int

    def choose(self, maxima: Maxima, rows: Sequence[SamplingRow]) -> mx.array:
        tokens = maxima.largest(max(row.params.top_k for row in rows))
        weights = _weights(maxima.at(tokens), maxima, rows)
        top_k = mx.array([[row.params.top_k] for row in rows])
        weights = mx.where(mx.arange(tokens.shape[1]) < top_k, weights, 0)
        mass = mx.cumsum(weights, axis=1)
        # A token stays while those above it hold less than top_p; 1 is off, whatever the rounding.
        top_p = _column(p if (p := row.params.top_p) < 1 else math.inf for row in rows)
        n_kept = mx.maximum((mass - weights < top_p * mass[:, -1:]).sum(axis=1, keepdims=True), 1)
        smallest = mx.take_along_axis(weights, n_kept - 1, axis=1)
        kept = _cut(weights * (weights >= smallest), rows)
        rank = _reach(mx.cumsum(kept, axis=1), _uniforms(rows, 1))
        return mx.take_along_axis(tokens, rank, axis=1)


@dataclass(frozen=True, slots=True)
class Rejection:
    """Rows without top_k and top_p, by rejection: only tokens that are proposed are weighed.

    A column of DEPTH tokens is proposed as if each weighed as much as its likeliest, and one of its
    tokens, which is accepted with the chance of its weight beside that. So what is accepted is a
    draw from the distribution, and a proposal is accepted with a chance of at least 1 / DEPTH.
    """

    def choose(self, maxima: Maxima, rows: Sequence[SamplingRow]) -> mx.array:
        bounds = _cut(_weights(maxima.columns, maxima, rows), rows)
        to_block, to_column, to_line, to_accept = mx.split(_uniforms(rows, 4 * PROPOSALS), 4, 1)
        block = _draw(bounds.sum(axis=2), to_block)
        in_block = mx.take_along_axis(bounds, block[:, :, None], axis=1)
        column = _reach(mx.cumsum(in_block, axis=2), to_column[:, :, None])
        bound = mx.take_along_axis(in_block, column, axis=2)[..., 0]
        line = mx.ceil(to_line * DEPTH).astype(mx.uint32) - 1
        token = block * BLOCK + line * COLUMNS + column[..., 0]
        weight = _cut(_weights(maxima.at(token), maxima, rows), rows)
        accepted = (to_accept * bound <= weight) & (weight > 0)
        first = mx.argmax(accepted, axis=1, keepdims=True)
        drawn = mx.take_along_axis(token, first, axis=1)
        return mx.where(accepted.any(axis=1, keepdims=True), drawn, maxima.likeliest())


@dataclass(frozen=True, slots=True)
class TopP:
    """Rows with top_p and without top_k.

    The nucleus is not searched for: tokens are drawn from all, and the first that is inside is a
    draw from the nucleus. Of the draws of a round, sorted, those inside are found by halving, where
    each step sums up what is likelier than one of them. If none is inside, the next round draws
    above the likeliest of them, as FlashInfer's sampler does.
    """

    rounds: int
    halvings: int
    """A round has so many draws that those inside are told from the rest in as many steps."""

    @classmethod
    def of(cls, top_p: float) -> "TopP":
        """With so many draws that a row is hardly ever without one from its nucleus: see MISSES.

        A draw is inside with a chance of at least top_p. Where none of a round's 15 is, a sixteenth
        of what was outside is left to the next, on average.
        """
        for halvings in range(1, MOST_HALVINGS + 1):
            if (1 - top_p) ** (2**halvings - 1) <= MISSES:
                return cls(1, halvings)
        return cls(1 + math.ceil(-math.log2(max(top_p, MISSES)) / 2.4), MOST_HALVINGS)

    def choose(self, maxima: Maxima, rows: Sequence[SamplingRow]) -> mx.array:
        weights = _weights(maxima.logits, maxima, rows)
        nucleus = _column(row.params.top_p for row in rows) * totals(weights)
        weights = _cut(weights, rows)
        chosen = maxima.likeliest()
        is_chosen = mx.zeros_like(maxima.peaks) > 0
        uniforms = _uniforms(rows, 2 * (2**self.halvings - 1) * self.rounds)
        for of_round in uniforms.split(self.rounds, axis=1):
            tokens, their_weights = _propose(weights, of_round)
            ranked = -mx.sort(-their_weights, axis=1)
            n_inside = self._count_inside(weights, ranked, nucleus)
            smallest = mx.take_along_axis(ranked, mx.maximum(n_inside, 1) - 1, axis=1)
            first = mx.argmax(their_weights >= smallest, axis=1, keepdims=True)
            token = mx.take_along_axis(tokens, first, axis=1)
            chosen = mx.where((n_inside > 0) & ~is_chosen, token, chosen)
            is_chosen = is_chosen | (n_inside > 0)
            weights = weights * (weights > ranked[:, :1])
        return chosen

    def _count_inside(self, weights: mx.array, ranked: mx.array, nucleus: mx.array) -> mx.array:
        """How many of a round's weights `ranked`, the largest first, have less above them than the
        nucleus holds: [rows, 1].
        """
        total = totals(weights)
        n_inside = mx.zeros(nucleus.shape, dtype=mx.int32)
        for step in (2**halving for halving in reversed(range(self.halvings))):
            bound = mx.take_along_axis(ranked, n_inside + (step - 1), axis=1)
            above = total - (totals(mx.minimum(weights, bound)) - totals(weights > bound) * bound)
            n_inside = mx.where(above < nucleus, n_inside + step, n_inside)
        return n_inside


Choice: TypeAlias = Greedy | TopK | Rejection | TopP

GREEDY_BELOW = 1e-5
"""Temperatures under this are 0: the quotients would be beyond float32's precision anyway."""


def choice_for(params: SamplingParams) -> Choice:
    """How a row with such parameters gets its token; rows with the same choice go together."""
    if params.temperature < GREEDY_BELOW or params.top_p == 0:
        return Greedy()
    if params.top_k > 0:
        return TopK(1 << (params.top_k - 1).bit_length())
    return Rejection() if params.top_p >= 1 else TopP.of(params.top_p)


def _propose(weights: mx.array, uniforms: mx.array) -> tuple[mx.array, mx.array]:
    """Tokens drawn by their weights [rows, vocab], and the weights of these: [rows, n] each.

    First one of the strips' columns, then one of its tokens, by half of the `uniforms`
    [rows, 2 n] each.
    """
    strips = strips_of(weights)
    to_column, to_strip = mx.split(uniforms, 2, axis=1)
    column = _draw(strips.sum(axis=1), to_column)
    inside = mx.take_along_axis(strips, column[:, None, :], axis=2)
    strip = _reach(mx.cumsum(inside, axis=1), to_strip[:, None, :], axis=1)
    chosen = mx.take_along_axis(inside, strip, axis=1)
    return strip[:, 0] * strips.shape[2] + column, chosen[:, 0]


def _draw(weights: mx.array, uniforms: mx.array) -> mx.array:
    """Indices [rows, n] drawn by weights [rows, size], by `uniforms` [rows, n] in (0, 1].

    As `_reach`, in two short steps: first among every so many of the sums, then between two.
    """
    rows, size = weights.shape
    mass = mx.cumsum(weights, axis=1)
    wanted = (uniforms * mass[:, -1:])[:, :, None]
    length = math.isqrt(size - 1) + 1
    segments = mx.pad(mass, [(0, 0), (0, -size % length)], constant_values=math.inf)
    segments = segments.reshape(rows, -1, length)
    segment = (segments[:, None, :-1, -1] < wanted).sum(axis=2)
    within = (mx.take_along_axis(segments, segment[:, :, None], axis=1) < wanted).sum(axis=2)
    return (segment * length + within).astype(mx.uint32)


def _reach(mass: mx.array, uniforms: mx.array, axis: int = -1) -> mx.array:
    """The first index along `axis` where the running sums `mass` reach a part of the whole.

    The parts, `uniforms` in (0, 1], are at least 2^-24: an index is never drawn that adds nothing
    to the sum, and none outside.
    """
    whole = mx.take(mass, mx.array([mass.shape[axis] - 1]), axis=axis)
    return (mass < uniforms * whole).sum(axis=axis, keepdims=True).astype(mx.uint32)


def _uniforms(rows: Sequence[SamplingRow], count: int) -> mx.array:
    return mx.array(np.stack([row.uniforms(count) for row in rows]))


def _weights(logits: mx.array, maxima: Maxima, rows: Sequence[SamplingRow]) -> mx.array:
    """How likely some `logits` [rows, ...] are beside the likeliest, at the rows' temperatures.

    For -inf 1e-36, which no sum with the likeliest's weight of 1 notices.
    """
    shape = (len(rows), *(1,) * (logits.ndim - 1))
    coldness = _column(1 / row.params.temperature for row in rows)
    return softmax_exp((logits - maxima.peaks.reshape(shape)) * coldness.reshape(shape))


def _cut(weights: mx.array, rows: Sequence[SamplingRow]) -> mx.array:
    """Weights [rows, ...] with 0 where a row's min_p is above."""
    if all(row.params.min_p <= 0 for row in rows):
        return weights
    least = _column(row.params.min_p for row in rows)
    return weights * (weights >= least.reshape(len(rows), *(1,) * (weights.ndim - 1)))


def _column(values: Iterable[float]) -> mx.array:
    return mx.array(list(values), dtype=mx.float32)[:, None]
