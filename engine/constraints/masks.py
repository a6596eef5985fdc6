"""The masks of a batch: which tokens its guided rows may choose from."""

from collections.abc import Sequence

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask_par, get_bitmask_shape

from engine.constraints.guide import AllBut, AlsoAllowed, Choice
from engine.step import Masks


class MaskFiller:
    """Fills masks on threads of its own, without Python's lock, while the device computes."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._executor: LLExecutor | None = None  # its threads start with the first grammar

    def fill(self, choices: Sequence[Choice], banned: Sequence[Sequence[int]]) -> Masks:
        """One mask for each choice. A token that is banned stays out, unless no other is left:
        what a grammar asks for wins over `min_tokens`.
        """
        bits = np.zeros(get_bitmask_shape(len(choices), self._vocab_size), dtype=np.int32)
        matchers = []
        for row, choice in enumerate(choices):
            match choice:
                case LLMatcher():
                    matchers.append((choice, row))
                case AlsoAllowed(matcher=matcher):
                    matchers.append((matcher, row))
                case AllBut(token_ids=token_ids):
                    bits[row] = -1
                    _ban(bits[row], token_ids)
                case int():
                    _allow(bits[row], choice)
        if matchers:
            self._executor = self._executor or LLExecutor()
            fill_next_token_bitmask_par(self._executor, matchers, bits)
        for matcher, row in matchers:
            if matcher.is_error():
                bits[row] = 0  # rules out all, so that the row fails alone
        for row, choice in enumerate(choices):
            if isinstance(choice, AlsoAllowed):
                for token_id in choice.token_ids:
                    _allow(bits[row], token_id)
        for row, tokens in enumerate(banned):
            _ban(bits[row], tokens)
        return bits


def _allow(words: Masks, token_id: int) -> None:
    """A token that the model does not have stays out, so that a row of such alone fails alone."""
    if token_id < 32 * len(words):
        words.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)


def _ban(words: Masks, tokens: Sequence[int]) -> None:
    left = words.view(np.uint32).copy()
    for token_id in tokens:
        left[token_id // 32] &= np.uint32(~(1 << token_id % 32) & 0xFFFFFFFF)
    if left.any():
        words[:] = left.view(np.int32)
