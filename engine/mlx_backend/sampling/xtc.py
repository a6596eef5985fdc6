"""Draws with XTC, which at random leaves out all tokens above a threshold but the least likely one.

https://github.com/oobabooga/text-generation-webui/pull/6335, with mlx-lm's protected tokens.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from engine.mlx_backend.sampling.draws import (
    DrawParams,
    Weights,
    first_ranks,
    nucleus,
    propose,
    random_bits,
    reached,
    token_ids,
    uniforms,
)
from engine.mlx_backend.sampling.maxima import BLOCK_TOKENS, Maxima, indices, strips_of, total_of
from engine.mlx_backend.sampling.weights import LOWEST_SCORE, softmax_weights


@dataclass(frozen=True, slots=True)
class ExcludeTop:
    """Rows with XTC and without top_k and top_p. The probabilities that the threshold is compared
    with are those of temperature 1 among the tokens that the other cuts leave, as mlx-lm has them.
    """

    protected: tuple[int, ...]

    is_random: ClassVar[bool] = True

    def choose(self, logits: mx.array, params: DrawParams) -> tuple[mx.array, mx.array]:
        strips = strips_of(logits)
        peaks = strips.max(axis=1, keepdims=True).max(axis=3, keepdims=True)
        n_columns = strips.shape[3]
        tokens = indices(BLOCK_TOKENS, axis=1) * n_columns + indices(n_columns, axis=3)
        bits = random_bits(params.keys, 2)
        is_kept = _is_left_by_min_p(strips, peaks, params) & (strips > -math.inf)
        left = _without_top_choices(strips, tokens, peaks, is_kept, bits, params, self.protected)
        likeliest = left.max(axis=1, keepdims=True).max(axis=3, keepdims=True)
        weights = softmax_weights(left, likeliest, params.coldness, LOWEST_SCORE)
        proposed = propose(Weights.of(weights), bits[:, :, :1])
        return token_ids(proposed.strip, proposed.column, n_columns, logits.shape[1] - 1), peaks


@dataclass(frozen=True, slots=True)
class SortedExcludeTop:
    """Rows with XTC and top_k or top_p: all tokens are sorted, or the first `most`."""

    most: int
    protected: tuple[int, ...]

    is_random: ClassVar[bool] = True

    def choose(self, logits: mx.array, params: DrawParams) -> tuple[mx.array, mx.array]:
        maxima = Maxima.of(logits)
        tokens, largest = maxima.largest(self.most)
        ranks = indices(tokens.shape[1], axis=1)
        bits = random_bits(params.keys, 2)
        is_kept = _is_left_by_cuts(largest, maxima.peaks, ranks, params)
        left = _without_top_choices(
            largest, tokens, maxima.peaks, is_kept, bits, params, self.protected
        )
        likeliest = left.max(axis=1, keepdims=True)
        weights = softmax_weights(left, likeliest, params.coldness, LOWEST_SCORE)
        before = mx.cumsum(weights, axis=1, inclusive=False)
        whole = weights.sum(axis=1, keepdims=True)
        bits = bits[:, :, :1, :1]
        rank = reached(weights, before, whole, bits, ranks).max(axis=1, keepdims=True)
        return mx.take_along_axis(tokens, rank, axis=1), maxima.peaks


def _is_left_by_cuts(
    largest: mx.array, peaks: mx.array, ranks: mx.array, params: DrawParams
) -> mx.array:
    """Whether top_k, top_p and min_p leave each of the logits, which are in order. A token may be
    left whose weight is 0 at a low temperature.
    """
    weights = first_ranks(
        softmax_weights(largest, peaks, params.coldness, LOWEST_SCORE), ranks, params.top_k
    )
    before = mx.cumsum(weights, axis=1, inclusive=False)
    whole = weights.sum(axis=1, keepdims=True)
    smallest = nucleus(weights, before, whole, params.top_p).min(axis=1, keepdims=True)
    is_likely = _is_left_by_min_p(largest, peaks, params)
    return (ranks < params.top_k) & (weights >= smallest) & is_likely & (largest > -math.inf)


def _is_left_by_min_p(logits: mx.array, peaks: mx.array, params: DrawParams) -> mx.array:
    has_min_p = params.least_score > LOWEST_SCORE + 1
    return ~has_min_p | ((logits - peaks) * params.coldness >= params.least_score)


def _without_top_choices(
    logits: mx.array,
    tokens: mx.array,
    peaks: mx.array,
    is_kept: mx.array,
    bits: mx.array,
    params: DrawParams,
    protected: tuple[int, ...],
) -> mx.array:
    """The logits that are kept, -inf for others, and for the tokens that are likelier than the
    least likely one above the threshold, where the second pair of random numbers says so.
    """
    weights = mx.where(is_kept, mx.exp(logits - peaks), 0.0)
    probabilities = weights / total_of(weights)
    above = mx.where(probabilities > params.xtc_threshold, probabilities, math.inf)
    least = above.min(axis=1, keepdims=True).min(axis=3, keepdims=True)
    is_excluded = probabilities > least
    is_excluded &= uniforms(bits[:, :, 1:, :1]) <= params.xtc_probability
    for token in protected:
        is_excluded &= tokens != token
    return mx.where(is_kept & ~is_excluded, logits, -math.inf)
