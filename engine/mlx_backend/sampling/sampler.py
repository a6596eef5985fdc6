"""Chooses the next tokens of a batch, and reports log-probabilities. Lazy: only `read` waits."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import mlx.core as mx
import numpy as np

from engine.core.step import Masks, SampledToken
from engine.mlx_backend.exponential import softmax_exp
from engine.mlx_backend.sampling.draws import Choice, choice_for
from engine.mlx_backend.sampling.edits import SamplingRow, edit_tokens, keep_allowed
from engine.mlx_backend.sampling.maxima import Maxima, totals
from engine.values.output import TokenLogprob


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


@dataclass(frozen=True, slots=True)
class Drawn:
    """The tokens chosen for some rows, perhaps not yet computed."""

    tokens: mx.array
    """uint32 [rows], always in the vocabulary: what a next forward can read on the device."""
    _peaks: mx.array
    _scored: tuple[int, ...]
    _tops: tuple[int, ...]
    _scores: Scores | None

    def arrays(self) -> list[mx.array]:
        """All that `read` needs to have been evaluated."""
        return [self.tokens, self._peaks, *(self._scores or ())]

    def read(self) -> list[SampledToken | None]:
        """The tokens, with a logprob where the row asks for one. Waits for what is not evaluated.

        None where a row's logits leave nothing to sample: NaN, +inf, or every token ruled out.
        """
        sampled = [SampledToken(token_id) for token_id in as_list(self.tokens)]
        reports = self._scores.read(self._tops) if self._scores else ()
        for row, report in zip(self._scored, reports, strict=True):
            sampled[row] = SampledToken(report.token_id, report)
        usable = _are_usable(self._peaks)
        return [token if use else None for token, use in zip(sampled, usable, strict=True)]


@dataclass(frozen=True, slots=True)
class Scored:
    """Log-probabilities of given tokens, perhaps not yet computed."""

    _peaks: mx.array
    _scores: Scores
    _top: int

    def arrays(self) -> list[mx.array]:
        """All that `read` needs to have been evaluated."""
        return [self._peaks, *self._scores]

    def read(self) -> list[TokenLogprob] | None:
        """One for each row; None where any row's logits are no distribution."""
        if not all(_are_usable(self._peaks)):
            return None
        return self._scores.read([self._top] * len(self._scores.tokens))


class Sampler:
    """Samples and scores rows of logits. Holds no state: that of a sequence is in its row."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def sample(
        self, logits: mx.array, rows: Sequence[SamplingRow], masks: Masks, masked: Sequence[int]
    ) -> Drawn:
        """One token for each row of logits [rows, vocab], at least one, of any float type.

        `masks[i]` says what row `masked[i]` may choose from. A token depends on its row and its
        logits alone, bit for bit, whatever the batch. The logprob is that of the given logits;
        there is none where `top_logprobs` is None.
        Raises ValueError when the shape is not [len(rows), vocab].
        """
        raw = self._float32(logits, len(rows))
        edited = self._edited(raw, rows, masked)
        if len(masked):
            edited = keep_allowed(edited, _masks_of_all(len(rows), masks, masked))
        maxima = Maxima.of(edited)
        tokens = mx.minimum(_choose(maxima, rows), self._vocab_size - 1)  # NaN leads anywhere
        scored = [row for row, one in enumerate(rows) if one.params.top_logprobs is not None]
        tops = [rows[row].params.top_logprobs or 0 for row in scored]
        scores = _score_rows(raw, tokens, scored, max(tops, default=0))
        return Drawn(tokens, maxima.peaks, tuple(scored), tuple(tops), scores)

    def score(self, logits: mx.array, next_tokens: Sequence[int], top: int) -> Scored:
        """Log-probabilities of given tokens, one for each row of logits [n, vocab], n at least 1.

        Raises ValueError when the shape is not [len(next_tokens), vocab].
        """
        raw = self._float32(logits, len(next_tokens))
        tokens = mx.array(list(next_tokens), dtype=mx.uint32)
        maxima = Maxima.of(raw)
        return Scored(maxima.peaks, score(maxima, tokens, min(top, self._vocab_size)), top)

    def _edited(
        self, logits: mx.array, rows: Sequence[SamplingRow], masked: Sequence[int]
    ) -> mx.array:
        of_rows = [row.edits() for row in rows]
        for index in masked:
            of_rows[index] = rows[index].edits_beside_mask()
        return edit_tokens(logits, of_rows)

    def _float32(self, logits: mx.array, rows: int) -> mx.array:
        if logits.shape != (rows, self._vocab_size):
            raise ValueError(f"logits are {logits.shape}, not {(rows, self._vocab_size)}")
        return logits.astype(mx.float32)


def _choose(maxima: Maxima, rows: Sequence[SamplingRow]) -> mx.array:
    """A token [rows] for each row; rows with the same choice go together."""
    together: dict[Choice, list[int]] = {}
    for index, row in enumerate(rows):
        together.setdefault(choice_for(row.params), []).append(index)
    if len(together) == 1:
        [choice] = together
        return choice.choose(maxima, rows)[:, 0]
    tokens = mx.zeros(len(rows), dtype=mx.uint32)
    for choice, indices in together.items():
        some = mx.array(indices)
        its_rows = [rows[index] for index in indices]
        tokens[some] = choice.choose(maxima.of_rows(some), its_rows)[:, 0]
    return tokens


def _score_rows(logits: mx.array, tokens: mx.array, rows: list[int], width: int) -> Scores | None:
    if not rows:
        return None
    index = mx.array(rows)
    return score(Maxima.of(logits[index]), tokens[index], min(width, logits.shape[1]))


def _masks_of_all(n_rows: int, masks: Masks, masked: Sequence[int]) -> mx.array:
    """The masks, and between them the rows that may choose any token: one pass over all logits is
    cheaper than to take some rows out and put them back.
    """
    bits = np.full((n_rows, masks.shape[-1]), -1, dtype=masks.dtype)
    bits[list(masked)] = masks
    return mx.array(bits.view(np.uint32))


def _are_usable(peaks: mx.array) -> Iterable[bool]:
    return [math.isfinite(peak) for [peak] in as_list(peaks)]
