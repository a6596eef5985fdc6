"""Draws one token for each row of logits: the likeliest, or one by the weights that the cuts of
top_k, top_p and min_p leave. `kind_of` says which of four ways a request's parameters take.

`draw` is a pure function of arrays, which `mx.compile` can trace. A row's token depends on its own
line of the arrays alone, bit for bit, whatever the other rows are.

Compiled in itself is only what goes over a whole vocabulary or is in every draw: on a CPU a kernel
takes a compiler the better part of a second where it has not been compiled before.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypeAlias

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from engine.mlx_backend.exponential import LOWEST_SCORE, softmax_weights
from engine.mlx_backend.sampling.maxima import (
    BLOCK_TOKENS,
    Maxima,
    in_whole_blocks,
    indices,
    strips_of,
    totals,
)
from engine.values.request import SamplingParams

UNIFORM_BITS = 24
"""Random numbers of this many bits are exact in float32."""

GREEDY_BELOW = 1e-5
"""Temperatures under this are 0: the quotients would be beyond float32's precision anyway."""

MISSES = 2.0**-23
"""A row with top_p takes its likeliest token if no draw is in its nucleus: less often than this."""

MOST_HALVINGS = 4


class DrawParams(NamedTuple):
    """What draws depend on besides the logits, one line for each row."""

    keys: mx.array
    """uint32 [rows, 2]: 32 bits of the seed, and the index of the token in the output."""
    coldness: mx.array
    """float32 [rows, 1]: 1 / temperature."""
    least_score: mx.array
    """float32 [rows, 1]: the logarithm of min_p, below which a score is cut. A token's score is its
    logit less the row's largest, times the coldness."""
    top_k: mx.array
    """int32 [rows, 1]."""
    top_p: mx.array
    """float32 [rows, 1]; infinite where it is 1, for that cuts nothing, whatever the rounding."""

    @classmethod
    def of(
        cls, rows: Sequence[SamplingParams], seeds: Sequence[int], output_indices: Sequence[int]
    ) -> "DrawParams":
        keys = list(zip(map(_digest, seeds), output_indices, strict=True))
        return cls(
            mx.array(np.array(keys, dtype=np.uint32)),
            _column(1 / max(row.temperature, GREEDY_BELOW) for row in rows),
            _column(math.log(max(row.min_p, math.exp(LOWEST_SCORE))) for row in rows),
            _column((min(row.top_k, 2**31 - 1) for row in rows), np.int32),
            _column(row.top_p if row.top_p < 1 else math.inf for row in rows),
        )


class Draw(NamedTuple):
    """What `draw` returns for rows of logits."""

    tokens: mx.array
    """uint32 [rows]: always in the vocabulary. It means nothing where the peak is not finite."""
    peaks: mx.array
    """float32 [rows, 1]: the row's largest logit; NaN where any is, -inf where all are."""
    next_keys: mx.array
    """The keys of the rows' next tokens."""


@dataclass(frozen=True, slots=True)
class Greedy:
    """The likeliest token; of equal logits the one with the lowest id."""

    is_random: ClassVar[bool] = False

    def choose(self, logits: mx.array, params: DrawParams) -> tuple[mx.array, mx.array]:
        maxima = Maxima.of(logits)
        return maxima.likeliest(), maxima.peaks


@dataclass(frozen=True, slots=True)
class Inverse:
    """Rows without top_k and top_p: one of all tokens, by the sums of their weights."""

    is_random: ClassVar[bool] = True

    def choose(self, logits: mx.array, params: DrawParams) -> tuple[mx.array, mx.array]:
        logits = in_whole_blocks(logits)
        peaks = strips_of(logits).max(axis=1).max(axis=1, keepdims=True)
        weights = softmax_weights(logits, peaks, params.coldness, params.least_score)
        tokens, _ = _propose(weights, *_uniforms(params.keys, 2, 1))
        return tokens.reshape(len(logits)), peaks


@dataclass(frozen=True, slots=True)
class TopK:
    """Rows with a top_k: that many logits are sorted, and no others."""

    most: int
    """At least the top_k of any row, and not much more: a row that needs few tokens does not wait
    for one that needs many."""

    is_random: ClassVar[bool] = True

    @classmethod
    def of(cls, top_k: int) -> "TopK":
        """The least power of two that is enough, or three quarters of it."""
        most = 1 << (top_k - 1).bit_length()
        return cls(most * 3 // 4 if most * 3 // 4 >= top_k else most)

    def choose(self, logits: mx.array, params: DrawParams) -> tuple[mx.array, mx.array]:
        maxima = Maxima.of(logits)
        tokens = maxima.largest(self.most)
        at = maxima.at(tokens)
        weights = softmax_weights(at, maxima.peaks, params.coldness, LOWEST_SCORE)
        weights = mx.where(indices(tokens.shape[1]) < params.top_k, weights, 0.0)
        before = mx.cumsum(weights, axis=1, inclusive=False)
        whole = weights.sum(axis=1, keepdims=True)
        # A token stays while the tokens above it hold less than top_p; equal ones stay together.
        inside = mx.where(before < params.top_p * whole, weights, math.inf)
        is_kept = weights >= inside.min(axis=1, keepdims=True)
        scores = (at - maxima.peaks) * params.coldness
        kept = mx.where(is_kept & (scores >= params.least_score), weights, 0.0)
        rank = _pick(kept[:, :, None], _uniforms(params.keys, 2, 1)[0]).reshape(len(tokens), 1)
        return mx.take_along_axis(tokens, rank, axis=1).reshape(len(tokens)), maxima.peaks


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
    """A round has 2^halvings - 1 draws: as many steps tell those inside from the rest."""
    has_min_p: bool

    is_random: ClassVar[bool] = True

    @classmethod
    def of(cls, top_p: float, has_min_p: bool) -> "TopP":
        """With enough draws that a row is hardly ever without one from its nucleus: see MISSES.

        A draw is inside with a chance of at least top_p. Where none of a round's 15 is, a sixteenth
        of what was outside is left to the next, on average.
        """
        for halvings in range(1, MOST_HALVINGS + 1):
            if (1 - top_p) ** (2**halvings - 1) <= MISSES:
                return cls(1, halvings, has_min_p)
        rounds = 1 + math.ceil(-math.log2(max(top_p, MISSES)) / 2.4)
        return cls(rounds, MOST_HALVINGS, has_min_p)

    def choose(self, logits: mx.array, params: DrawParams) -> tuple[mx.array, mx.array]:
        maxima = Maxima.of(logits)
        weights = softmax_weights(maxima.logits, maxima.peaks, params.coldness, LOWEST_SCORE)
        nucleus = params.top_p * totals(weights)
        if self.has_min_p:
            weights = _cut(weights, maxima.logits, maxima.peaks, params)
        shape = (len(logits), 2**self.halvings - 1)
        found = list[tuple[mx.array, mx.array]]()
        uniforms = _uniforms(params.keys, 2 * self.rounds, shape[1])
        for first, second in zip(uniforms[::2], uniforms[1::2], strict=True):
            proposed = _propose(weights, first, second)
            tokens, their_weights = (array.reshape(shape) for array in proposed)
            ranked = -mx.sort(-their_weights, axis=1)
            n_inside = self._count_inside(weights, ranked, nucleus)
            smallest = mx.take_along_axis(ranked, mx.maximum(n_inside, 1) - 1, axis=1)
            earliest = mx.argmax(their_weights >= smallest, axis=1, keepdims=True)
            found.append((n_inside > 0, mx.take_along_axis(tokens, earliest, axis=1)))
            weights = _above(weights, ranked[:, :1])
        chosen = maxima.likeliest()[:, None]
        for is_inside, token in reversed(found):
            chosen = mx.where(is_inside, token, chosen)
        return chosen.reshape(len(logits)), maxima.peaks

    def _count_inside(self, weights: mx.array, ranked: mx.array, nucleus: mx.array) -> mx.array:
        """How many of a round's weights `ranked`, the largest first, have less above them than the
        nucleus holds: [rows, 1].
        """
        n_inside = mx.zeros(nucleus.shape, dtype=mx.int32)
        for step in (2**halving for halving in reversed(range(self.halvings))):
            bound = mx.take_along_axis(ranked, n_inside + (step - 1), axis=1)
            above = totals(_above(weights, bound))
            n_inside = mx.where(above < nucleus, n_inside + step, n_inside)
        return n_inside


Kind: TypeAlias = Greedy | Inverse | TopK | TopP


def kind_of(params: SamplingParams) -> Kind:
    """How a row with such parameters gets its token; rows of one kind go together."""
    if params.temperature < GREEDY_BELOW or params.top_p == 0:
        return Greedy()
    if params.top_k > 0:
        return TopK.of(params.top_k)
    return Inverse() if params.top_p >= 1 else TopP.of(params.top_p, params.min_p > 0)


def draw(kind: Kind, logits: mx.array, params: DrawParams) -> Draw:
    """A token for each row of logits [rows, vocab], of any float type. Lazy."""
    tokens, peaks = kind.choose(logits.astype(mx.float32), params)
    if logits.shape[1] % BLOCK_TOKENS:
        tokens = mx.minimum(tokens, logits.shape[1] - 1)  # NaN may lead into the padding
    following = mx.array(np.array([0, 1], dtype=np.uint32))
    return Draw(tokens, peaks, params.keys + following if kind.is_random else params.keys)


def _uniforms(keys: mx.array, n_arrays: int, count: int) -> list[mx.array]:
    """An even number of arrays [rows, 1, count] of random numbers in (0, 1].

    MLX's generator is Threefry, a function of a key and a counter: the numbers of one key tell
    nothing about those of the next.
    """
    bits = mx.vmap(lambda key: mx.random.split(key, n_arrays * count // 2))(keys)
    uniforms = _to_uniforms(bits.reshape(len(keys), n_arrays, count))
    return list(mx.split(uniforms, n_arrays, axis=1))


@mx.compile
def _to_uniforms(bits: mx.array) -> mx.array:
    """Multiples of 2^-24 in (0, 1]."""
    return ((bits >> (32 - UNIFORM_BITS)) + 1).astype(mx.float32) * 2.0**-UNIFORM_BITS


def _propose(weights: mx.array, first: mx.array, second: mx.array) -> tuple[mx.array, mx.array]:
    """Tokens drawn by their weights [rows, vocab], and the weights of these: [rows, 1, n] each.

    The uniform numbers `first` [rows, 1, n] draw one of the strips' columns, `second` one of the
    column's tokens.
    """
    strips = strips_of(weights)
    rows, _, n_columns = strips.shape
    column = _pick(strips.sum(axis=1, keepdims=True).reshape(rows, n_columns, 1), first)
    inside = mx.take_along_axis(strips, column, axis=2)
    strip = _pick(inside, second)
    return strip * n_columns + column, mx.take_along_axis(inside, strip, axis=1)


def _pick(weights: mx.array, uniforms: mx.array) -> mx.array:
    """Indices along the middle axis drawn by weights [rows, size, 1 or n]: uint32 [rows, 1, n].

    Each is the last index that weighs something and has less before it than the wanted part of the
    whole, `uniforms` [rows, 1, n], which is above 0. As the first index that weighs something has
    nothing before it, no rounding and no order of a device's sums leads to one that weighs nothing.
    Where nothing weighs anything, it is 0.
    """
    before = mx.cumsum(weights, axis=1, inclusive=False)
    whole = weights.sum(axis=1, keepdims=True)
    ids = indices(weights.shape[1])[:, None]
    return _if_reached(before, uniforms, whole, weights, ids).max(axis=1, keepdims=True)


@mx.compile
def _if_reached(
    before: mx.array, uniforms: mx.array, whole: mx.array, weights: mx.array, ids: mx.array
) -> mx.array:
    return mx.where((before < uniforms * whole) & (weights > 0), ids, 0)


@mx.compile
def _above(weights: mx.array, bound: mx.array) -> mx.array:
    return mx.where(weights > bound, weights, 0.0)


@mx.compile
def _cut(weights: mx.array, logits: mx.array, peaks: mx.array, params: DrawParams) -> mx.array:
    """The weights of all logits, 0 where min_p cuts them."""
    return mx.where((logits - peaks) * params.coldness >= params.least_score, weights, 0.0)


def _digest(seed: int) -> int:
    """32 bits of a seed modulo 2^64. Seeds from 0 to 2^32 - 1 are their own digests."""
    seed %= 2**64
    return (seed + (seed >> 32) * 0x9E3779B1) % 2**32


def _column(values: Iterable[float], dtype: npt.DTypeLike = np.float32) -> mx.array:
    return mx.array(np.array(list(values), dtype=dtype)[:, None])
