"""The sampling state of a sequence in the batch, and what it changes about the logits: penalties,
biases, bans and masks."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from copy import copy
from functools import partial
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from engine.core.step import Sampling
from engine.mlx_backend.sampling.draws import Kind, kind_of

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
        self._counts = Counter(sampling.output_tokens)
        seen = dict.fromkeys([*sampling.prompt_tokens, *self._counts])
        self._slots = {token: slot for slot, token in enumerate(biases | seen)}
        self._tokens = np.array(list(self._slots), dtype=np.uint32)
        self._values = _unchanged(len(self._slots))
        self._values[_BIAS, self._slots_of(biases)] = list(biases.values())
        self._values[_DIVISOR, self._slots_of(seen)] = params.repetition_penalty
        penalties = [self._penalty(count) for count in self._counts.values()]
        self._values[_PENALTY, self._slots_of(self._counts)] = penalties

    @property
    def has_edits(self) -> bool:
        """Whether `edits` changes any token."""
        return bool(self._slots or (self._banned and self._is_banning))

    def edits(self) -> Edits:
        """What to change about the logits of single tokens. The banned ones are ruled out while the
        output is shorter than min_tokens.
        """
        if not self._is_banning:
            return self.edits_with_mask()
        tokens, values = self.edits_with_mask()
        known = [token for token in self._banned if token in self._slots]
        others = [token for token in self._banned if token not in self._slots]
        values = np.concatenate([values, _unchanged(len(others))], axis=1)
        values[_PENALTY, [*self._slots_of(known), *range(len(tokens), values.shape[1])]] = math.inf
        return Edits(np.concatenate([tokens, np.array(others, dtype=np.uint32)]), values)

    def edits_with_mask(self) -> Edits:
        """What to change where a mask rules out the banned tokens. A view: it changes as tokens are
        accepted.
        """
        n_tokens = len(self._slots)
        return Edits(self._tokens[:n_tokens], self._values[:, :n_tokens])

    def accept(self, token_id: int) -> None:
        """Take note of the token that was sampled last."""
        self.output_index += 1
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
        if not self._is_constant:
            row._counts, row._slots = self._counts.copy(), self._slots.copy()
            row._tokens, row._values = self._tokens.copy(), self._values.copy()
        row.accept(token_id)
        return row

    @property
    def _is_banning(self) -> bool:
        return self.output_index < self.params.min_tokens

    def _slots_of(self, tokens: Iterable[int]) -> list[int]:
        return [self._slots[token] for token in tokens]

    def _penalty(self, count: int) -> float:
        """What a token loses that has been generated `count` times, at least once."""
        return self.params.presence_penalty + self.params.frequency_penalty * count


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
