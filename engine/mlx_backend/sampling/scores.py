"""Log-probabilities of tokens under the model's own distribution."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import mlx.core as mx

from engine.mlx_backend.sampling.exponential import exp2
from engine.mlx_backend.sampling.grid import Grid
from engine.types import TokenLogprob


class Scores(NamedTuple):
    """Log-probabilities of tokens [rows] and of the likeliest [rows, width], in no order. Lazy."""

    tokens: mx.array
    logprobs: mx.array
    top_tokens: mx.array
    top_logprobs: mx.array

    def read(self, tops: Sequence[int]) -> list[TokenLogprob]:
        """Each row with its number of alternatives, best first, of equal ones the lowest id."""
        rows = zip(*(as_list(array) for array in self), tops, strict=True)
        return [
            TokenLogprob(token, logprob, tuple(_best(zip(ids, logprobs, strict=True), top)))
            for token, logprob, ids, logprobs, top in rows
        ]


def score(grid: Grid, logits: mx.array, peaks: mx.array, tokens: mx.array, width: int) -> Scores:
    """Scores of one token [rows] for each row of logits [rows, vocab], and `width` alternatives.

    `peaks` [rows, 1] are the largest logits.
    """
    normalizer = peaks + mx.log(grid.totals(exp2((logits - peaks) * math.log2(math.e))))
    logprobs = mx.take_along_axis(logits, tokens[:, None], axis=-1) - normalizer
    if width == 0:
        nothing = mx.zeros((len(logits), 0))
        return Scores(tokens, logprobs[:, 0], nothing.astype(mx.uint32), nothing)
    top_logits, top_tokens = grid.largest(logits, width)
    return Scores(tokens, logprobs[:, 0], top_tokens, top_logits - normalizer)


def as_list(array: mx.array) -> list[Any]:
    return cast(list[Any], array.tolist())


def _best(candidates: Iterable[tuple[int, float]], top: int) -> list[tuple[int, float]]:
    return sorted(candidates, key=lambda candidate: (-candidate[1], candidate[0]))[:top]
