"""Changes to the logits of single tokens: biases, penalties, bans."""

import math
from collections.abc import Sequence
from typing import TypeAlias

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from engine.step import Sampling

EDIT = np.dtype(
    [
        ("token", np.uint32),
        ("bias", np.float32),  # is added first
        ("divisor", np.float32),  # divides what is positive, multiplies what is negative
        ("penalty", np.float32),  # is subtracted last; infinite where the token is ruled out
    ]
)
"""One token of a row, and what happens to its logit."""

Edits: TypeAlias = npt.NDArray[np.void]
"""Some EDITs, of each token one at most."""


class TokenEdits:
    """The tokens of one sequence whose logits change, in a table that grows as tokens come.

    repetition_penalty as in CTRL (arXiv:1909.05858), presence and frequency as OpenAI has them.
    """

    def __init__(self, sampling: Sampling) -> None:
        self._params = sampling.params
        self._banned = tuple(token for token in sampling.banned_tokens if _is_token(token))
        biases = [item for item in self._params.logit_bias.items() if _is_token(item[0])]
        generated, counts = np.unique(_tokens(sampling.output_tokens), return_counts=True)
        seen = np.unique(np.concatenate([_tokens(sampling.prompt_tokens), generated]))
        biased = _tokens([token for token, _ in biases])
        tokens = np.unique(np.concatenate([biased, seen]))
        self._table = np.zeros(len(tokens), dtype=EDIT)
        self._table["token"] = tokens
        self._table["divisor"] = 1.0
        self._table["bias"][np.searchsorted(tokens, biased)] = [bias for _, bias in biases]
        self._table["divisor"][np.searchsorted(tokens, seen)] = self._params.repetition_penalty
        penalties = [self._penalty(count) for count in counts.tolist()]
        self._table["penalty"][np.searchsorted(tokens, generated)] = penalties
        self._slots = {int(token): slot for slot, token in enumerate(tokens)}
        self._counts = dict(zip(generated.tolist(), counts.tolist(), strict=True))

    @property
    def table(self) -> Edits:
        """A view: it changes as tokens are counted."""
        return self._table[: len(self._slots)]

    def with_bans(self) -> Edits:
        """The table, with the banned tokens ruled out; a copy."""
        strangers = [token for token in self._banned if token not in self._slots]
        bans = np.zeros(len(strangers), dtype=EDIT)
        bans["token"], bans["divisor"] = strangers, 1.0
        table = np.concatenate([self.table, bans])
        slots = [self._slots[token] for token in self._banned if token in self._slots]
        table["penalty"][[*slots, *range(len(self._slots), len(table))]] = math.inf
        return table

    def count(self, token_id: int) -> None:
        """One more token has been generated."""
        params = self._params
        if (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == OFF:
            return
        count = self._counts[token_id] = self._counts.get(token_id, 0) + 1
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot == len(self._table):
            self._table = np.concatenate([self._table, np.zeros(slot + 64, dtype=EDIT)])
        bias, penalty = self._table["bias"][slot], self._penalty(count)
        self._table[slot] = (token_id, bias, params.repetition_penalty, penalty)

    def _penalty(self, count: int) -> float:
        """What a token loses that has been generated so often, at least once."""
        return self._params.presence_penalty + self._params.frequency_penalty * count


OFF = (1.0, 0.0, 0.0)
"""repetition_penalty, presence_penalty, frequency_penalty that change nothing."""


def edit_tokens(logits: mx.array, edits: Sequence[Edits]) -> mx.array:
    """The logits [rows, vocab] with the edits of each row carried out.

    Tokens outside the vocabulary have no logit and are passed over.
    """
    vocab_size = logits.shape[-1]
    joined = np.concatenate(edits)
    known = joined["token"] < vocab_size
    rows = np.repeat(np.arange(len(edits)), [len(of_row) for of_row in edits])[known]
    joined = joined[known]
    if not len(joined):
        return logits
    places = mx.array((rows * vocab_size + joined["token"]).astype(np.uint32))
    edited = mx.flatten(logits)
    before = edited[places] + _column(joined, "bias")
    divisor = _column(joined, "divisor")
    after = mx.where(before > 0, before / divisor, before * divisor) - _column(joined, "penalty")
    edited[places] = after
    return edited.reshape(logits.shape)


@mx.compile
def keep_allowed(logits: mx.array, bits: mx.array) -> mx.array:
    """Rule out all tokens but those of each row's mask: `bits`, uint32 [rows, ceil(vocab / 32)],
    token t at bit t % 32, from the lowest, of word t // 32.

    Compiled: one pass over the logits, where single operations take a dozen times as long.
    """
    rows, vocab_size = logits.shape
    allowed = (bits[:, :, None] >> mx.arange(32, dtype=mx.uint32)) & 1
    return mx.where(allowed.reshape(rows, -1)[:, :vocab_size], logits, -math.inf)


def _column(edits: Edits, name: str) -> mx.array:
    return mx.array(np.ascontiguousarray(edits[name]))


def _tokens(token_ids: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.array(token_ids, dtype=np.int64)


def _is_token(token_id: int) -> bool:
    return token_id in range(2**31)
