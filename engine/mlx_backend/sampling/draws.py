"""Draws one token for each row of logits: the likeliest, or one by the weights that the cuts of
top_k, top_p and min_p leave.

`draw` is a pure function of arrays, which `mx.compile` can trace. A row's token depends on its own
line of the arrays alone, bit for bit, whatever the other rows are.

On a CPU each primitive costs 2 to 4 us, so runs of elementwise operations are compiled by
themselves, for draws that are not compiled as a whole. Their kernels are built at load; see
`loading/compiler.py`.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import ClassVar, NamedTuple, Protocol

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from engine.mlx_backend.sampling.maxima import BLOCK_TOKENS, Maxima, indices, strips_of, total_of
from engine.mlx_backend.sampling.weights import LOWEST_SCORE, softmax_weights
from engine.values.request import SamplingParams

GREEDY_BELOW = 1e-5
"""Temperatures under this are 0: the quotients would be beyond float32's precision anyway."""

ALL_TOKENS = 2**31 - 1
"""A top_k that cuts nothing."""

UNIFORM_BITS = 24
"""Random numbers of this many bits are exact in float32."""

MISSES = 2.0**-23
"""A row with top_p takes its likeliest token if no draw is in its nucleus: less often than this."""

MOST_HALVINGS = 6
"""Of a round of top_p. With 8, and 255 draws, a top_p of 0.1 took twice as long as in rounds of 15
draws (8 rows of 8,192 tokens, two cores)."""

MOST_PARTS = 8
"""Parts of the sorted draws between which one compiled function chooses: MLX does not fuse more."""


class DrawParams(NamedTuple):
    """What draws depend on besides the logits, one line for each row."""

    keys: mx.array
    """uint32 [rows, 1, 2]: 32 bits of the seed, and the index of the token in the output."""
    coldness: mx.array
    """float32 [rows, 1, 1, 1]: 1 / temperature."""
    least_score: mx.array
    """float32 [rows, 1, 1, 1]: the logarithm of min_p, below which a score is cut. A token's score
    is its logit less the row's largest, times the coldness."""
    top_k: mx.array
    """int32 [rows, 1, 1, 1]."""
    top_p: mx.array
    """float32 [rows, 1, 1, 1]; infinite where it is 1, for that cuts nothing, whatever the
    rounding."""
    xtc_probability: mx.array
    """float32 [rows, 1, 1, 1]; 0 where it is off."""
    xtc_threshold: mx.array
    """float32 [rows, 1, 1, 1]."""

    @classmethod
    def of(
        cls, rows: Sequence[SamplingParams], seeds: Sequence[int], output_indices: Sequence[int]
    ) -> "DrawParams":
        keys = list(zip(map(_digest, seeds), output_indices, strict=True))
        return cls(
            mx.array(np.array(keys, dtype=np.uint32)[:, None]),
            _column(1 / max(row.temperature, GREEDY_BELOW) for row in rows),
            _column(math.log(max(row.min_p, math.exp(LOWEST_SCORE))) for row in rows),
            _column((min(row.top_k or ALL_TOKENS, ALL_TOKENS) for row in rows), np.int32),
            _column(row.top_p if row.top_p < 1 else math.inf for row in rows),
            _column(row.xtc.probability if row.xtc else 0 for row in rows),
            _column(row.xtc.threshold if row.xtc else 1 for row in rows),
        )


def _digest(seed: int) -> int:
    """32 bits of a seed modulo 2^64. Seeds from 0 to 2^32 - 1 are their own digests."""
    seed %= 2**64
    return (seed + (seed >> 32) * 0x9E3779B1) % 2**32


def _column(values: Iterable[float], dtype: npt.DTypeLike = np.float32) -> mx.array:
    return mx.array(np.array(list(values), dtype=dtype)[:, None, None, None])


class Kind(Protocol):
    """A way in which rows get their tokens; rows of one kind go together. Kinds are compared."""

    is_random: ClassVar[bool]

    def choose(self, logits: mx.array, params: DrawParams) -> tuple[mx.array, mx.array]:
        """The token and the peak of each row of logits [rows, vocab]."""
        ...


class Draw(NamedTuple):
    """What `draw` returns for rows of logits."""

    tokens: mx.array
    """uint32 [rows]: always in the vocabulary. It means nothing where the peak is not finite."""
    peaks: mx.array
    """float32 [rows, 1, 1, 1]: the row's largest logit; NaN where any is, -inf where all are."""
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
        strips = strips_of(logits)
        peaks = strips.max(axis=1, keepdims=True).max(axis=3, keepdims=True)
        weights = softmax_weights(strips, peaks, params.coldness, params.least_score)
        proposed = propose(Weights.of(weights), random_bits(params.keys, 1))
        tokens = token_ids(proposed.strip, proposed.column, strips.shape[3], logits.shape[1] - 1)
        return tokens, peaks


@dataclass(frozen=True, slots=True)
class TopK:
    """Rows with a top_k: that many logits are sorted, and no others.

    The tokens that top_k, top_p and min_p leave are the first of the sorted ones, so that the
    nucleus and the draw share one running sum of the weights.
    """

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
        tokens, largest = maxima.largest(self.most)
        ranks = indices(tokens.shape[1], axis=1)
        weights = softmax_weights(largest, maxima.peaks, params.coldness, LOWEST_SCORE)
        weights = first_ranks(weights, ranks, params.top_k)
        before = mx.cumsum(weights, axis=1, inclusive=False)
        whole = weights.sum(axis=1, keepdims=True)
        smallest = nucleus(weights, before, whole, params.top_p).min(axis=1, keepdims=True)
        weights = _cut(weights, largest, maxima.peaks, params, smallest)
        whole = weights.sum(axis=1, keepdims=True)
        bits = random_bits(params.keys, 1)[..., :1]
        rank = reached(weights, before, whole, bits, ranks).max(axis=1, keepdims=True)
        return mx.take_along_axis(tokens, rank, axis=1), maxima.peaks


@dataclass(frozen=True, slots=True)
class TopP:
    """Rows with top_p and without top_k: rejection sampling, for to sort a vocabulary is slow.

    Tokens are drawn from the whole vocabulary, and the first that is inside the nucleus is a draw
    from the nucleus. The draws are sorted, and the smallest inside is found by halving: each step
    sums up the weights above one of the draws. The likeliest token, which is always inside, stands
    after the draws and is taken where none of them is inside. If there is another round, it draws
    above the likeliest draw of this one, as FlashInfer's sampler does.
    """

    rounds: int
    halvings: int
    """A round has 2^halvings - 1 draws: as many steps tell those inside from the rest."""
    has_min_p: bool

    is_random: ClassVar[bool] = True

    @classmethod
    def of(cls, top_p: float, has_min_p: bool) -> "TopP":
        """With enough draws that a row is hardly ever without one from its nucleus: see MISSES.

        A draw is inside with a chance of at least top_p. Where none of a round's n draws is, only
        the share x of all that is above the likeliest of them is left, with a chance of e^(-n x);
        then those of the next round miss with a chance of e^(-n top_p / x). The likeliest way to
        miss in all of r rounds has a chance of e^(-r n top_p^(1/r)), and all ways together, summed
        up numerically for n from 31 to 63, one of at most about e^r times that.
        """
        for rounds in count(1):
            for halvings in range(1, MOST_HALVINGS + 1):
                n_draws = 2**halvings - 1
                missed = (
                    (1 - top_p) ** n_draws
                    if rounds == 1
                    else math.exp(rounds - rounds * n_draws * top_p ** (1 / rounds))
                )
                if missed <= MISSES:
                    return cls(rounds, halvings, has_min_p)
        raise AssertionError("each further round makes misses rarer")

    def choose(self, logits: mx.array, params: DrawParams) -> tuple[mx.array, mx.array]:
        strips = strips_of(logits)
        maxima = strips.max(axis=1, keepdims=True)
        peaks = maxima.max(axis=3, keepdims=True)
        weights = Weights.of(softmax_weights(strips, peaks, params.coldness, LOWEST_SCORE))
        nucleus = _Nucleus(params.top_p, weights.whole)
        if self.has_min_p:
            weights = Weights.of(_cut(weights.strips, strips, peaks, params, 0.0))
        slots = indices(2**self.halvings, axis=2)
        last_slot = slots.size - 1
        is_last = mx.array(np.arange(slots.size).reshape(slots.shape) == last_slot)
        bits = random_bits(params.keys, self.rounds * slots.size)
        found = list[mx.array]()
        for of_round in mx.split(bits, self.rounds, axis=2) if self.rounds > 1 else [bits]:
            proposed = propose(weights, of_round, _Likeliest(maxima, peaks, is_last))
            ranked = mx.sort(proposed.weights, axis=2)
            bound, above = _search(weights.strips, ranked, nucleus)
            keys = _keys_inside(
                proposed, bound, above, nucleus, slots, strips.shape[3], logits.shape[1] - 1
            )
            found.append(keys.min(axis=2, keepdims=True))
            if len(found) < self.rounds:
                weights = Weights.of(_above(weights.strips, ranked[:, :, -2:-1]))
        chosen = found.pop()
        for key in reversed(found):
            chosen = mx.where(key < last_slot << 32, key, chosen)
        return chosen.astype(mx.uint32), peaks  # the lower half of a key is the token


def draw(kind: Kind, logits: mx.array, params: DrawParams) -> Draw:
    """A token for each row of logits [rows, vocab], of any float type. Lazy."""
    tokens, peaks = kind.choose(logits.astype(mx.float32), params)
    following = mx.array(np.array([0, 1], dtype=np.uint32))
    next_keys = params.keys + following if kind.is_random else params.keys
    return Draw(tokens.reshape(len(logits)), peaks, next_keys)


def random_bits(keys: mx.array, n: int) -> mx.array:
    """Pairs of random numbers of 32 bits: uint32 [rows, 1, n, 2].

    MLX's generator is Threefry, a function of a key and a counter: the numbers of one key tell
    nothing about those of the next.
    """
    return mx.vmap(mx.vmap(lambda key: mx.random.split(key, n)))(keys)


def uniforms(bits: mx.array) -> mx.array:
    """Multiples of 2^-24 in (0, 1]."""
    return ((bits >> (32 - UNIFORM_BITS)) + 1).astype(mx.float32) * 2.0**-UNIFORM_BITS


# Tokens drawn by the weights of a whole vocabulary


class Weights(NamedTuple):
    """The weights of all tokens, and their sums."""

    strips: mx.array
    """[rows, BLOCK_TOKENS, 1, n], as `strips_of` has the logits."""
    columns: mx.array
    """[rows, 1, 1, n]: the sum of each column of the strips."""
    whole: mx.array
    """[rows, 1, 1, 1]."""

    @classmethod
    def of(cls, strips: mx.array) -> "Weights":
        columns = strips.sum(axis=1, keepdims=True)
        return cls(strips, columns, columns.sum(axis=3, keepdims=True))


class _Likeliest(NamedTuple):
    """Makes the last of several draws the likeliest token."""

    maxima: mx.array
    """[rows, 1, 1, n]: the largest logit of each column."""
    peaks: mx.array | float
    """[rows, 1, 1, 1]: the largest of all."""
    is_last: mx.array
    """bool [1, 1, draws, 1]."""


class _Proposed(NamedTuple):
    """Tokens drawn: [rows, 1, draws, 1] each."""

    strip: mx.array
    column: mx.array
    weights: mx.array


def propose(weights: Weights, bits: mx.array, likeliest: _Likeliest | None = None) -> _Proposed:
    """Tokens drawn by their weights: of each pair of random numbers [rows, 1, draws, 2] the first
    draws a column of the strips, and the second one of its tokens.
    """
    first, second = mx.split(bits, 2, axis=3)
    column = _pick(weights.columns, weights.whole, first, 3, likeliest)
    # A CPU gathers four times as fast where the indices are along the axis.
    rows, _, n_draws, _ = column.shape
    inside = mx.take_along_axis(weights.strips, column.reshape(rows, 1, 1, n_draws), axis=3)
    inside = inside.reshape(rows, BLOCK_TOKENS, n_draws, 1)
    if likeliest is not None:
        likeliest = _Likeliest(inside, 1.0, likeliest.is_last)  # of the peak the weight is 1
    strip = _pick(inside, inside.sum(axis=1, keepdims=True), second, 1, likeliest)
    return _Proposed(strip, column, mx.take_along_axis(inside, strip, axis=1))


def _pick(
    weights: mx.array, whole: mx.array, bits: mx.array, axis: int, likeliest: _Likeliest | None
) -> mx.array:
    """Indices along an axis, drawn by weights whose sum is `whole`: uint32.

    Each is the last index that weighs something and has less before it than the wanted part of the
    whole, which is above 0. As the first index that weighs something has nothing before it, no
    rounding and no order of a device's sums leads to one that weighs nothing. Where nothing weighs
    anything, it is 0.
    """
    before = mx.cumsum(weights, axis=axis, inclusive=False)
    ids = indices(weights.shape[axis], axis)
    return reached(weights, before, whole, bits, ids, likeliest).max(axis=axis, keepdims=True)


@mx.compile
def reached(
    weights: mx.array,
    before: mx.array,
    whole: mx.array,
    bits: mx.array,
    ids: mx.array,
    likeliest: _Likeliest | None = None,
) -> mx.array:
    is_reached = (before < uniforms(bits) * whole) & (weights > 0)
    if likeliest is not None:
        is_likeliest = likeliest.maxima >= likeliest.peaks
        is_reached = mx.where(likeliest.is_last, is_likeliest, is_reached)
    return mx.where(is_reached, ids, 0)


@mx.compile
def token_ids(strip: mx.array, column: mx.array, n_columns: int, last_token: int) -> mx.array:
    """The ids of tokens in strips. NaN may lead into the padding, which begins after a token."""
    return mx.minimum(strip * n_columns + column, last_token)


# The cuts


@mx.compile
def first_ranks(weights: mx.array, ranks: mx.array, top_k: mx.array) -> mx.array:
    """The weights of tokens in order, 0 where top_k cuts them."""
    return mx.where(ranks < top_k, weights, 0.0)


@mx.compile
def nucleus(weights: mx.array, before: mx.array, whole: mx.array, top_p: mx.array) -> mx.array:
    """The weights of tokens in order, infinite where the tokens before hold top_p or more. A token
    that weighs as much as the smallest stays as well."""
    return mx.where(before < top_p * whole, weights, math.inf)


@mx.compile
def _cut(
    weights: mx.array,
    logits: mx.array,
    peaks: mx.array,
    params: DrawParams,
    least: mx.array | float,
) -> mx.array:
    """The weights, 0 where they are below the least or where min_p cuts them."""
    is_kept = (weights >= least) & ((logits - peaks) * params.coldness >= params.least_score)
    return mx.where(is_kept, weights, 0.0)


@mx.compile
def _above(weights: mx.array, bound: mx.array) -> mx.array:
    return mx.where(weights > bound, weights, 0.0)


class _Nucleus(NamedTuple):
    """The likeliest tokens that together hold `top_p` of the whole: [rows, 1, 1, 1] each."""

    top_p: mx.array
    whole: mx.array


def _search(strips: mx.array, ranked: mx.array, nucleus: _Nucleus) -> tuple[mx.array, mx.array]:
    """The nucleus's bound among weights `ranked` [rows, 1, n, 1], the smallest first, the last of
    which is inside: [rows, 1, 1, 1], and the sum of all weights above it. Weights above the bound
    are inside, smaller ones outside; those equal to it are inside if the sum says so.
    """
    while True:
        n_parts = min(MOST_PARTS, ranked.shape[2])
        parts, sums = list(mx.split(ranked, n_parts, axis=2)), list[mx.array]()
        while n_parts >> len(sums) > 1:
            bound = _halved(parts, sums, nucleus)[:, :, -1:]
            sums.append(total_of(_above(strips, bound)))
        if ranked.shape[2] == n_parts:
            return bound, sums[-1]
        ranked = _halved(parts, sums, nucleus)


@mx.compile
def _halved(parts: list[mx.array], sums: list[mx.array], nucleus: _Nucleus) -> mx.array:
    """The last of the lower half of those parts, in order, that hold the nucleus's bound.

    sums[i]: of all weights above the last one of the i-th lower half.
    """
    for above in sums:
        half = len(parts) // 2
        is_outside = above / nucleus.whole >= nucleus.top_p
        halves = zip(parts[:half], parts[half:], strict=True)
        parts = [mx.where(is_outside, upper, lower) for lower, upper in halves]
    return parts[(len(parts) - 1) // 2]


@mx.compile
def _keys_inside(
    proposed: _Proposed,
    bound: mx.array,
    above: mx.array,
    nucleus: _Nucleus,
    slots: mx.array,
    n_columns: int,
    last_token: int,
) -> mx.array:
    """int64 keys that rise with the slots, and whose lower half is the token, for what is inside
    the nucleus and for the last slot; for others one that is above all of these.
    """
    weights = proposed.weights
    is_bound_inside = above / nucleus.whole < nucleus.top_p
    is_inside = mx.where(is_bound_inside, weights >= bound, weights > bound)
    tokens = token_ids(proposed.strip, proposed.column, n_columns, last_token)
    keys = slots.astype(mx.int64) * 2**32 + tokens.astype(mx.int64)
    return mx.where(is_inside | (slots == slots.size - 1), keys, 2**62)
