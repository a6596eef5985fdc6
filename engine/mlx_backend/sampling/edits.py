"""The sampling state of a sequence in the batch, and what it changes about the logits: penalties,
biases, bans and masks."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from engine.core.step import Masks, Sampling
from engine.mlx_backend.sampling.draws import (
    ALL_TOKENS,
    GREEDY_BELOW,
    Greedy,
    Inverse,
    Kind,
    TopK,
    TopP,
)
from engine.mlx_backend.sampling.dry import DryState
from engine.mlx_backend.sampling.xtc import ExcludeTop, SortedExcludeTop
from engine.values.request import SamplingParams

PENALTIES_OFF = (1.0, 0.0, 0.0)
"""repetition_penalty, presence_penalty and frequency_penalty that change nothing."""

_BIAS, _DIVISOR, _PENALTY = range(3)
_TOKEN_IDS = range(2**32)


class Edits(NamedTuple):
    """Some tokens of a row, each once, and what happens to their logits."""

    tokens: npt.NDArray[np.uint32]
    values: npt.NDArray[np.float32]
    """[3, tokens]: a bias, that is added; a divisor, that then divides what is positive and
    multiplies what is negative; a penalty, that is subtracted last, infinite for a banned token.
    """


class BadWords:
    """Words that an output must not contain, each of one or more tokens, as vLLM's `bad_words`.

    A word's last token is ruled out where the output ends with the tokens before it. Immutable.
    """

    def __init__(self, words: Iterable[tuple[int, ...]]) -> None:
        self._last_tokens: dict[tuple[int, ...], set[int]] = {}
        for *before, last in words:
            self._last_tokens.setdefault(tuple(before), set()).add(last)
        self._lengths = sorted({len(before) for before in self._last_tokens})
        self.n_recent = self._lengths[-1]
        """How many of the output's last tokens decide what is ruled out next."""

    def ruled_out(self, recent: tuple[int, ...]) -> set[int]:
        """The tokens that may not follow an output whose last `n_recent` tokens, or all where it
        has fewer, are `recent`.
        """
        endings = [recent[len(recent) - n :] for n in self._lengths if n <= len(recent)]
        return set().union(*(self._last_tokens.get(ending, ()) for ending in endings))


class TokenRules:
    """Which tokens a sequence may generate: `allowed_token_ids` alone, and no bad word.

    Mutable: it follows the output.
    """

    def __init__(self, params: SamplingParams, output_tokens: Sequence[int]) -> None:
        self._allowed = params.allowed_token_ids
        self._bad_words = BadWords(params.bad_words) if params.bad_words else None
        self._n_recent = 0 if self._bad_words is None else self._bad_words.n_recent
        self._recent = tuple(output_tokens[max(len(output_tokens) - self._n_recent, 0) :])
        self._allowed_mask: Masks | None = None

    def accept(self, token_id: int) -> None:
        """Take note of the token that was sampled last."""
        if self._n_recent:
            self._recent = (*self._recent, token_id)[-self._n_recent :]

    def mask(self, n_words: int) -> Masks:
        """The tokens that may come next, as one mask of `n_words`."""
        mask = np.full(n_words, -1, dtype=np.int32)
        if self._allowed is not None:
            mask = self._mask_of_allowed(n_words).copy()
        if self._bad_words is not None:
            mask &= ~mask_of(self._bad_words.ruled_out(self._recent), n_words)
        return mask

    def narrow(self, mask: Masks) -> Masks:
        """A grammar's mask without the tokens that may not come next. A rule that would leave
        nothing of it is passed over: what a grammar asks for wins.
        """
        n_words = len(mask)
        if self._allowed is not None:
            mask = _narrowed(mask, self._mask_of_allowed(n_words))
        if self._bad_words is not None:
            mask = _narrowed(mask, ~mask_of(self._bad_words.ruled_out(self._recent), n_words))
        return mask

    def _mask_of_allowed(self, n_words: int) -> Masks:
        if self._allowed_mask is None:
            self._allowed_mask = mask_of(self._allowed or (), n_words)
        return self._allowed_mask


def mask_of(tokens: Collection[int], n_words: int) -> Masks:
    """The mask, `[n_words]`, of these tokens alone. Tokens beyond it are passed over."""
    ids = np.fromiter(tokens, dtype=np.int64, count=len(tokens))
    ids = ids[ids < 32 * n_words]
    words = np.zeros(n_words, dtype=np.uint32)
    np.bitwise_or.at(words, ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
    return words.view(np.int32)


def _narrowed(mask: Masks, other: Masks) -> Masks:
    both = mask & other
    return both if both.any() else mask


class SamplingRow:
    """The sampling state of one sequence: where it is in its output, and its edits, in a table that
    grows as tokens are generated. Mutable: it follows the tokens that are sampled.

    repetition_penalty as in CTRL (arXiv:1909.05858), presence and frequency as OpenAI has them.
    """

    def __init__(self, sampling: Sampling) -> None:
        params = sampling.params
        self.params = params
        self.kind: Kind = kind_of(params)
        self.seed = sampling.seed
        self.output_index = sampling.output_index  # of the token that is drawn next
        off = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        self._is_constant = off == PENALTIES_OFF  # whatever is generated
        self._banned = [token for token in sampling.banned_tokens if token in _TOKEN_IDS]
        biases = {token: bias for token, bias in params.logit_bias.items() if token in _TOKEN_IDS}
        self.rules: TokenRules | None = None
        """Which tokens it may generate; None: any."""
        if params.allowed_token_ids is not None or params.bad_words:
            self.rules = TokenRules(params, sampling.output_tokens)
        self._counts = Counter(() if self._is_constant else sampling.output_tokens)
        repeats = params.repetition_penalty != 1
        seen = dict.fromkeys([*(sampling.prompt_tokens if repeats else ()), *self._counts])
        self._slots = {token: slot for slot, token in enumerate(biases | seen)}
        self._tokens = np.array(list(self._slots), dtype=np.uint32)
        self._values = _unchanged(len(self._slots))
        self._values[_BIAS, self._slots_of(biases)] = list(biases.values())
        self._values[_DIVISOR, self._slots_of(seen)] = params.repetition_penalty
        penalties = [self._penalty(count) for count in self._counts.values()]
        self._values[_PENALTY, self._slots_of(self._counts)] = penalties
        self._dry: DryState | None = None
        if params.dry is not None:
            text = [*sampling.prompt_tokens, *sampling.output_tokens]
            self._dry = DryState(params.dry, text)

    @property
    def has_edits(self) -> bool:
        """Whether any logit is changed before the draw."""
        return bool(self._slots or self.rules or self._dry or (self._banned and self._is_banning))

    def edits(self) -> Edits:
        """What to change about the logits of single tokens. The banned ones are ruled out while the
        output is shorter than min_tokens.
        """
        if not self._is_banning:
            return self.edits_with_mask()
        return _penalised(self.edits_with_mask(), dict.fromkeys(self._banned, math.inf))

    def edits_with_mask(self) -> Edits:
        """What to change where a mask rules out the banned tokens. It may be a view, which changes
        as tokens are accepted.
        """
        n_tokens = len(self._slots)
        edits = Edits(self._tokens[:n_tokens], self._values[:, :n_tokens])
        return edits if self._dry is None else _penalised(edits, self._dry.penalties())

    def accept(self, token_id: int) -> None:
        """Take note of the token that was sampled last."""
        self.output_index += 1
        if self.rules is not None:
            self.rules.accept(token_id)
        if self._dry is not None:
            self._dry = self._dry.followed_by(token_id)
        if self._is_constant:
            return
        self._counts[token_id] += 1
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot == len(self._tokens):
            more = slot + 64
            self._tokens = np.concatenate([self._tokens, np.zeros(more, dtype=np.uint32)])
            self._values = np.concatenate([self._values, _unchanged(more)], axis=1)
        self._tokens[slot] = token_id
        self._values[_DIVISOR, slot] = self.params.repetition_penalty
        self._values[_PENALTY, slot] = self._penalty(self._counts[token_id])

    def followed_by(self, token_id: int) -> "SamplingRow":
        """The state as it would be after that token; this one stays as it is."""
        row = copy(self)
        row.rules = copy(self.rules)
        if not self._is_constant:
            row._counts, row._slots = self._counts.copy(), self._slots.copy()
            row._tokens, row._values = self._tokens.copy(), self._values.copy()
        row.accept(token_id)
        return row

    def for_drafts(self) -> "SamplingRow":
        """A copy for the draws of a draft model, which reports no log-probabilities. For a later
        token only its `output_index` is to be raised.
        """
        row = copy(self)
        row.params = replace(self.params, top_logprobs=None)
        return row

    @property
    def _is_banning(self) -> bool:
        return self.output_index < self.params.min_tokens

    def _slots_of(self, tokens: Iterable[int]) -> list[int]:
        return [self._slots[token] for token in tokens]

    def _penalty(self, count: int) -> float:
        """What a token loses that has been generated `count` times, at least once."""
        return self.params.presence_penalty + self.params.frequency_penalty * count


def _penalised(edits: Edits, penalties: Mapping[int, float]) -> Edits:
    """The edits, and these penalties of tokens, which are added to their own."""
    slots = {token: slot for slot, token in enumerate(edits.tokens.tolist())}
    others = [token for token in penalties if token not in slots]
    slots |= {token: len(edits.tokens) + index for index, token in enumerate(others)}
    values = np.concatenate([edits.values, _unchanged(len(others))], axis=1)
    values[_PENALTY, [slots[token] for token in penalties]] += list(penalties.values())
    return Edits(np.concatenate([edits.tokens, np.array(others, dtype=np.uint32)]), values)


def edit_tokens(logits: mx.array, edits: Sequence[Edits]) -> mx.array:
    """The logits [rows, vocab] with the edits of each row carried out.

    Tokens outside the vocabulary have no logit and are passed over.
    """
    n_tokens = [len(of_row.tokens) for of_row in edits]
    if not any(n_tokens):
        return logits
    vocab_size = logits.shape[-1]
    tokens = np.concatenate([of_row.tokens for of_row in edits])
    values = np.concatenate([of_row.values for of_row in edits], axis=1)
    indices = np.repeat(np.arange(len(edits), dtype=np.uint32) * vocab_size, n_tokens) + tokens
    known = tokens < vocab_size
    return _edit(logits, mx.array(indices[known]), mx.array(values[:, known]))


def _edit(logits: mx.array, indices: mx.array, values: mx.array) -> mx.array:
    # Along an axis: on a CPU indexing takes dozens of times as long for each token.
    flat = mx.flatten(logits)
    changed = _change(mx.take_along_axis(flat, indices, axis=0), *values)
    return mx.put_along_axis(flat, indices, changed, axis=0).reshape(logits.shape)


@partial(mx.compile, shapeless=True)
def _change(logits: mx.array, bias: mx.array, divisor: mx.array, penalty: mx.array) -> mx.array:
    before = logits + bias
    return mx.where(before > 0, before / divisor, before * divisor) - penalty


@mx.compile
def keep_allowed(logits: mx.array, bits: mx.array) -> mx.array:
    """Rule out all tokens but those of each row's mask: `bits`, uint32 [rows, ceil(vocab / 32)],
    token t at bit t % 32, from the lowest, of word t // 32.

    Compiled: one pass over the logits, where single operations take a dozen times as long.
    """
    rows, vocab_size = logits.shape
    allowed = (bits[:, :, None] >> mx.arange(32, dtype=mx.uint32)) & 1
    return mx.where(allowed.reshape(rows, -1)[:, :vocab_size], logits, -math.inf)


def _unchanged(n_tokens: int) -> npt.NDArray[np.float32]:
    values = np.zeros((3, n_tokens), dtype=np.float32)
    values[_DIVISOR] = 1.0
    return values


def kind_of(params: SamplingParams) -> Kind:
    """How a row with such parameters gets its token; rows of one kind go together."""
    if params.temperature < GREEDY_BELOW or params.top_p == 0:
        return Greedy()
    if params.xtc is not None and params.xtc.probability > 0:
        if params.top_k <= 0 and params.top_p >= 1:
            return ExcludeTop(params.xtc.protected)
        most = TopK.of(params.top_k).most if params.top_k > 0 else ALL_TOKENS
        return SortedExcludeTop(most, params.xtc.protected)
    if params.top_k > 0:
        return TopK.of(params.top_k)
    return Inverse() if params.top_p >= 1 else TopP.of(params.top_p, params.min_p > 0)
