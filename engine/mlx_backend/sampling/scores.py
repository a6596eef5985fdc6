"""Log-probabilities of tokens under the model's own distribution."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import mlx.core as mx

from engine.mlx_backend.exponential import softmax_exp
from engine.mlx_backend.sampling.maxima import Maxima, totals
from engine.types.output import TokenLogprob


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


def score(maxima: Maxima, tokens: mx.array, width: int) -> Scores:
    """Scores of one token [rows] for each row of logits, and `width` alternatives."""
    weights = softmax_exp(maxima.logits - maxima.peaks)
    normalizer = maxima.peaks + mx.log(totals(weights))
    logprobs = maxima.at(tokens[:, None]) - normalizer
    if width == 0:
        nothing = mx.zeros((len(tokens), 0))
        return Scores(tokens, logprobs[:, 0], nothing.astype(mx.uint32), nothing)
    top_tokens = maxima.largest(width)
    return Scores(tokens, logprobs[:, 0], top_tokens, maxima.at(top_tokens) - normalizer)


def as_list(array: mx.array) -> list[Any]:
    return cast(list[Any], array.tolist())


def _best(candidates: Iterable[tuple[int, float]], top: int) -> list[tuple[int, float]]:
    return sorted(candidates, key=lambda candidate: (-candidate[1], candidate[0]))[:top]
