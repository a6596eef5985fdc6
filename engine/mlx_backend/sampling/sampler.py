"""Chooses the next tokens of a batch, and reports log-probabilities. All rows, one evaluation."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import mlx.core as mx
import numpy as np

from engine.mlx_backend.sampling import logits as change
from engine.step import NO_MASKS, Masks, SampledToken, SampleOrder
from engine.types import TokenLogprob

GREEDY_BELOW = 1e-5
"""Temperatures under this are 0: the quotients would be beyond float32's precision anyway."""


class UnusableLogits(ValueError):
    """Rows that leave nothing to sample: NaN, +inf, or every token ruled out.

    `rows` are their indices. The others are sound, and sampling them again draws the same tokens.
    """

    def __init__(self, rows: Sequence[int]) -> None:
        super().__init__(f"no token can be chosen from the logits of rows {list(rows)}")
        self.rows = tuple(rows)


class Change(Protocol):
    def __call__(self, logits: mx.array, orders: Sequence[SampleOrder]) -> mx.array: ...


@dataclass(frozen=True, slots=True)
class Stage:
    """A change to the logits of the rows that ask for it."""

    asked: Callable[[SampleOrder], bool]
    change: Change


def _is_drawn(order: SampleOrder) -> bool:
    return order.params.temperature >= GREEDY_BELOW


def _has_short_list(order: SampleOrder) -> bool:
    return _is_drawn(order) and 0 < order.params.top_k <= change.SHORT_LIST_TOKENS


def _has_long_list(order: SampleOrder) -> bool:
    cut = order.params.top_k > 0 or order.params.top_p < 1
    return _is_drawn(order) and cut and not _has_short_list(order)


EDITS = (
    Stage(lambda order: bool(order.params.logit_bias), change.add_bias),
    Stage(lambda order: order.params.repetition_penalty != 1, change.penalize_repetition),
    Stage(lambda order: order.params.presence_penalty != 0, change.penalize_presence),
    Stage(lambda order: order.params.frequency_penalty != 0, change.penalize_frequency),
    Stage(lambda order: bool(order.banned_tokens), change.ban),
)
"""What the request says about single tokens."""

DRAW = (
    Stage(_is_drawn, change.temper),
    Stage(_has_short_list, change.keep_short_list),
    Stage(_has_long_list, change.keep_head),
    Stage(lambda order: _is_drawn(order) and order.params.min_p > 0, change.keep_likely),
    Stage(_is_drawn, change.add_gumbel_noise),
)
"""What makes the argmax of a row a random draw. Greedy rows ask for none of it."""


class Sampler:
    """Samples and scores rows of logits. Holds no state: draws depend on seeds alone."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def sample(
        self, logits: mx.array, orders: Sequence[SampleOrder], masks: Masks = NO_MASKS
    ) -> list[SampledToken]:
        """One token for each row of logits [rows, vocab], any float type.

        A token depends on its order, its row and its mask alone, bit for bit, whatever the batch;
        `masks` has one for each order that is `masked`. The logprob is that of the given logits;
        None where `top_logprobs` is.
        Raises UnusableLogits; ValueError when the shape is not [len(orders), vocab].
        """
        raw = self._float32(logits, len(orders))
        if not orders:
            return []
        edited = _run(EDITS, raw, orders)
        if len(masks):
            edited = change.keep_allowed(edited, _masks_of_all(orders, masks))
        peaks = edited.max(axis=-1)
        tokens = mx.argmax(_run(DRAW, edited, orders), axis=-1)
        asking = [row for row, order in enumerate(orders) if order.params.top_logprobs is not None]
        tops = [orders[row].params.top_logprobs or 0 for row in asking]
        scores = _score_rows(raw, tokens, asking, max(tops, default=0))
        mx.eval(tokens, peaks, scores)
        _refuse_unusable(peaks)
        sampled = [SampledToken(token_id) for token_id in _list(tokens)]
        for row, report in zip(asking, scores.reports(tops) if scores else (), strict=True):
            sampled[row] = SampledToken(report.token_id, report)
        return sampled

    def score(self, logits: mx.array, next_tokens: Sequence[int], top: int) -> list[TokenLogprob]:
        """Log-probabilities of given tokens, one for each row of logits [n, vocab].

        Raises UnusableLogits; ValueError when the shape is not [len(next_tokens), vocab].
        """
        raw = self._float32(logits, len(next_tokens))
        if not next_tokens:
            return []
        peaks = raw.max(axis=-1)
        scores = _score(raw, mx.array(list(next_tokens), dtype=mx.uint32), top)
        mx.eval(peaks, scores)
        _refuse_unusable(peaks)
        return scores.reports([top] * len(next_tokens))

    def _float32(self, logits: mx.array, rows: int) -> mx.array:
        if logits.shape != (rows, self._vocab_size):
            raise ValueError(f"logits are {logits.shape}, not {(rows, self._vocab_size)}")
        return logits.astype(mx.float32)


class _Scores(NamedTuple):
    """Log-probabilities of tokens [rows] and of the likeliest [rows, width], in no order."""

    tokens: mx.array
    logprobs: mx.array
    top_tokens: mx.array
    top_logprobs: mx.array

    def reports(self, tops: Sequence[int]) -> list[TokenLogprob]:
        """Each row with its number of alternatives, best first, of equal ones the lowest id."""
        rows = zip(*(_list(array) for array in self), tops, strict=True)
        return [
            TokenLogprob(token, logprob, tuple(_best(zip(ids, logprobs, strict=True), top)))
            for token, logprob, ids, logprobs, top in rows
        ]


def _best(candidates: Iterable[tuple[int, float]], top: int) -> list[tuple[int, float]]:
    return sorted(candidates, key=lambda candidate: (-candidate[1], candidate[0]))[:top]


def _score_rows(logits: mx.array, tokens: mx.array, rows: list[int], width: int) -> _Scores | None:
    if not rows:
        return None
    index = mx.array(rows)
    return _score(logits[index], tokens[index], width)


def _score(logits: mx.array, tokens: mx.array, width: int) -> _Scores:
    normalizer = mx.logsumexp(logits, axis=-1, keepdims=True)
    logprobs = mx.take_along_axis(logits, tokens[:, None], axis=-1) - normalizer
    top_tokens = _largest(logits, min(width, logits.shape[-1]))
    top_logprobs = mx.take_along_axis(logits, top_tokens, axis=-1) - normalizer
    return _Scores(tokens, logprobs[:, 0], top_tokens, top_logprobs)


def _largest(logits: mx.array, width: int) -> mx.array:
    if width == 0:
        return mx.zeros((len(logits), 0), dtype=mx.uint32)
    return mx.argpartition(-logits, width - 1, axis=-1)[:, :width]


def _run(stages: Iterable[Stage], logits: mx.array, orders: Sequence[SampleOrder]) -> mx.array:
    for stage in stages:
        rows = [row for row, order in enumerate(orders) if stage.asked(order)]
        asking = [orders[row] for row in rows]
        logits = _on_rows(rows, logits, partial(stage.change, orders=asking))
    return logits


def _on_rows(
    rows: Sequence[int], logits: mx.array, edit: Callable[[mx.array], mx.array]
) -> mx.array:
    """The logits with some rows edited, the others as they were."""
    if len(rows) == len(logits):
        return edit(logits)
    if not rows:
        return logits
    index = mx.array(list(rows))
    edited = mx.array(logits)  # assignment changes the array object, which is shared
    edited[index] = edit(logits[index])
    return edited


def _masks_of_all(orders: Sequence[SampleOrder], masks: Masks) -> mx.array:
    """The masks, and between them the rows that may choose any token: one pass over all logits is
    cheaper than to take some rows out and put them back.
    """
    bits = np.full((len(orders), masks.shape[-1]), -1, dtype=masks.dtype)
    bits[[order.masked for order in orders]] = masks
    return mx.array(bits.view(np.uint32))


def _refuse_unusable(peaks: mx.array) -> None:
    """The largest logit of a row is NaN if any is, and -inf if all are."""
    unusable = [row for row, peak in enumerate(_list(peaks)) if not math.isfinite(peak)]
    if unusable:
        raise UnusableLogits(unusable)


def _list(array: mx.array) -> list[Any]:
    return cast(list[Any], array.tolist())
