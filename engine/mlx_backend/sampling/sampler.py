"""Chooses the next tokens of a batch, and reports log-probabilities. Lazy: only `read` waits."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, cast

import mlx.core as mx
import numpy as np

from engine.core.step import Masks, SampledToken
from engine.mlx_backend.sampling.draws import Draw, DrawParams, Kind, draw
from engine.mlx_backend.sampling.edits import SamplingRow, edit_tokens, keep_allowed
from engine.mlx_backend.sampling.maxima import Maxima, strips_of, total_of
from engine.mlx_backend.sampling.weights import LOWEST_SCORE, softmax_weights
from engine.values.output import TokenLogprob
from engine.values.request import SamplingParams


class Scores(NamedTuple):
    """Log-probabilities of tokens [rows] and of alternatives to each [rows, width]. Lazy."""

    tokens: mx.array
    logprobs: mx.array
    other_tokens: mx.array
    other_logprobs: mx.array

    @classmethod
    def of(cls, maxima: Maxima, tokens: mx.array, others: int | mx.array) -> "Scores":
        """Scores of one token [rows] for each row of logits, and of alternatives: given ones
        [rows, width], or a number of the likeliest, the best first, of equal logits the lowest id
        first.
        """
        rows = len(tokens)
        weights = softmax_weights(strips_of(maxima.logits), maxima.peaks, 1.0, LOWEST_SCORE)
        normalizer = (maxima.peaks + mx.log(total_of(weights))).reshape(rows, 1)
        logits = mx.take_along_axis(maxima.logits, tokens[:, None], axis=1)
        logprobs = (logits - normalizer)[:, 0]
        if isinstance(others, mx.array):
            other_logits = mx.take_along_axis(maxima.logits, others, axis=1)
            return cls(tokens, logprobs, others, other_logits - normalizer)
        if others == 0:
            nothing = mx.zeros((rows, 0))
            return cls(tokens, logprobs, nothing.astype(mx.uint32), nothing)
        likeliest, logits = (array.reshape(rows, -1) for array in maxima.largest(others))
        return cls(tokens, logprobs, likeliest, logits - normalizer)

    def read(self, counts: Sequence[int]) -> list[TokenLogprob]:
        """Each row with its number of alternatives. Waits for what is not evaluated."""
        rows = zip(*(as_list(array) for array in self), counts, strict=True)
        return [
            TokenLogprob(token, logprob, tuple(zip(ids[:count], logprobs[:count], strict=True)))
            for token, logprob, ids, logprobs, count in rows
        ]


def as_list(array: mx.array) -> list[Any]:
    return cast(list[Any], array.tolist())


class Reports(NamedTuple):
    """Scores of the drawn tokens of some rows, and how many alternatives each row reports."""

    counts: Mapping[int, int]  # by the index of the row among all that were drawn
    scores: Scores


@dataclass(frozen=True, slots=True)
class Drawn:
    """The tokens chosen for some rows, perhaps not yet computed."""

    tokens: mx.array
    """uint32, one for each row of logits, always in the vocabulary: what a next forward can read on
    the device. Those of padding rows, after the others, mean nothing."""
    peaks: mx.array
    """The largest logit of each row after all edits; not finite where nothing can be sampled."""
    _n_rows: int
    _reports: Sequence[Reports]  # of the rows that ask for logprobs

    def arrays(self) -> list[mx.array]:
        """All that `read` needs to have been evaluated."""
        scores = (array for reports in self._reports for array in reports.scores)
        return [self.tokens, self.peaks, *scores]

    def read(self) -> list[SampledToken | None]:
        """The tokens, with a logprob where the row asks for one. Waits for what is not evaluated.

        None where a row's logits leave nothing to sample: NaN, +inf, or every token ruled out.
        """
        sampled = [SampledToken(token_id) for token_id in as_list(self.tokens)[: self._n_rows]]
        for counts, scores in self._reports:
            for row, report in zip(counts, scores.read([*counts.values()]), strict=True):
                sampled[row] = SampledToken(report.token_id, report)
        usable = _are_usable(self.peaks)
        return [token if use else None for token, use in zip(sampled, usable, strict=False)]


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


DrawFunction: TypeAlias = Callable[[Kind, mx.array, DrawParams], Draw]


class _Prepared(NamedTuple):
    """Parameters on the device for the draws of some rows that come next."""

    rows: list[SamplingRow]
    output_indices: list[int]
    params: DrawParams


class Sampler:
    """Samples and scores rows of logits.

    The state of a sequence is in its row. What the sampler keeps only saves work: the parameters of
    the last draws, on the device, which serve again while the rows stay the same.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.draw_with: DrawFunction = draw
        """Draws where all rows are of one kind. To be replaced by a function that does the same,
        such as compiled ones looked up by kind and shape."""
        self._prepared: dict[Kind, _Prepared] = {}

    def sample(
        self, logits: mx.array, rows: Sequence[SamplingRow], masks: Masks, masked: Sequence[int]
    ) -> Drawn:
        """One token for each row of logits [n, vocab], of any float type. There is at least one
        row; where n is more than `len(rows)`, the last rows of the logits are padding.

        `masks[i]` says what row `masked[i]` may choose from. A token depends on its row and its
        logits alone, bit for bit, whatever the batch. The logprob is that of the given logits;
        there is none where `top_logprobs` is None.
        Raises ValueError when the logits' shape does not fit.
        """
        if logits.shape[0] < len(rows) or logits.shape[1:] != (self._vocab_size,):
            raise ValueError(f"logits are {logits.shape}, not {(len(rows), self._vocab_size)}")
        drawn = self._draw(_edited(logits, rows, masks, masked), rows)
        reports = [*self._reports(logits, drawn.tokens, [row.params for row in rows])]
        return Drawn(drawn.tokens, drawn.peaks, len(rows), reports)

    def _reports(
        self, logits: mx.array, drawn: mx.array, params: Sequence[SamplingParams]
    ) -> Iterator[Reports]:
        """What is reported of the drawn tokens of rows with these parameters."""
        asking = {i: one for i, one in enumerate(params) if one.top_logprobs is not None}
        best = {i: one.top_logprobs or 0 for i, one in asking.items() if not one.logprob_token_ids}
        if best:
            width = min(max(best.values()), self._vocab_size)
            yield Reports(best, _scores_of(logits, drawn, [*best], width))
        listed = {i: one.logprob_token_ids for i, one in asking.items() if one.logprob_token_ids}
        if listed:
            width = max(map(len, listed.values()))
            padded = [[*ids, *[ids[0]] * (width - len(ids))] for ids in listed.values()]
            others = mx.array(padded, dtype=mx.uint32)
            counts = {i: len(ids) for i, ids in listed.items()}
            yield Reports(counts, _scores_of(logits, drawn, [*listed], others))

    def score(self, logits: mx.array, next_tokens: Sequence[int], top: int) -> Scored:
        """Log-probabilities of given tokens, one for each row of logits [n, vocab], n at least 1.

        Raises ValueError when the shape is not [len(next_tokens), vocab].
        """
        if logits.shape != (expected := (len(next_tokens), self._vocab_size)):
            raise ValueError(f"logits are {logits.shape}, not {expected}")
        tokens = mx.array(list(next_tokens), dtype=mx.uint32)
        maxima = Maxima.of(logits.astype(mx.float32))
        return Scored(maxima.peaks, Scores.of(maxima, tokens, min(top, self._vocab_size)), top)

    def _draw(self, logits: mx.array, rows: Sequence[SamplingRow]) -> Draw:
        """Draws for all rows of logits, rows of one kind together. Padding is as the last row."""
        padded = [*rows, *[rows[-1]] * (len(logits) - len(rows))]
        groups: dict[Kind, list[int]] = {}
        for index, row in enumerate(padded):
            groups.setdefault(row.kind, []).append(index)
        last, self._prepared = self._prepared, {}
        draws = list[Draw]()
        for kind, indices in groups.items():
            group = [padded[index] for index in indices]
            params = _params_of(group, last.get(kind))
            if len(groups) == 1:
                drawn = self.draw_with(kind, logits, params)
            else:
                drawn = draw(kind, logits[mx.array(indices)], params)
            draws.append(drawn)
            params = params._replace(keys=drawn.next_keys)
            following = [row.output_index + 1 for row in group]
            self._prepared[kind] = _Prepared(group, following, params)
        if len(draws) == 1:
            return draws[0]
        order = mx.array(np.argsort([index for indices in groups.values() for index in indices]))
        return Draw(*(mx.concatenate(list(arrays))[order] for arrays in zip(*draws, strict=True)))


def _scores_of(
    logits: mx.array, drawn: mx.array, rows: Sequence[int], others: int | mx.array
) -> Scores:
    """The scores of the tokens that were drawn for some of the rows; see `Scores.of`."""
    chosen = mx.array(list(rows))
    return Scores.of(Maxima.of(logits[chosen].astype(mx.float32)), drawn[chosen], others)


def _params_of(rows: list[SamplingRow], prepared: _Prepared | None) -> DrawParams:
    """The prepared parameters if they are for these rows, and each has accepted a token since."""
    indices = [row.output_index for row in rows]
    if prepared is not None and prepared.rows == rows and prepared.output_indices == indices:
        return prepared.params
    return DrawParams.of([row.params for row in rows], [row.seed for row in rows], indices)


def _edited(
    logits: mx.array, rows: Sequence[SamplingRow], masks: Masks, masked: Sequence[int]
) -> mx.array:
    """The logits to draw from: those given where no row edits them."""
    if not len(masked) and not any(row.has_edits for row in rows):
        return logits
    edits = [row.edits() for row in rows]
    for index in masked:
        edits[index] = rows[index].edits_with_mask()
    edited = edit_tokens(logits.astype(mx.float32), edits)
    if not len(masked) and not any(row.rules for row in rows):
        return edited
    return keep_allowed(edited, _masks_of_all(logits.shape, rows, masks, masked))


def _masks_of_all(
    shape: tuple[int, ...], rows: Sequence[SamplingRow], masks: Masks, masked: Sequence[int]
) -> mx.array:
    """A mask for each row of logits of that shape, whether it may choose any token or not: one pass
    over all logits is cheaper than to take some rows out and put them back.
    """
    n_rows, vocab_size = shape
    bits = np.full((n_rows, -(-vocab_size // 32)), -1, dtype=np.int32)
    if len(masked):
        bits[list(masked)] = masks
    with_grammar = frozenset(masked)
    for index, row in enumerate(rows):
        if row.rules is not None:
            own = bits[index]
            bits[index] = (
                row.rules.narrow(own) if index in with_grammar else row.rules.mask(len(own))
            )
    return mx.array(bits.view(np.uint32))


def _are_usable(peaks: mx.array) -> Iterable[bool]:
    return [math.isfinite(peak) for peak in as_list(peaks.flatten())]
