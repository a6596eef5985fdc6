"""The masks of a step: which tokens its guided rows may choose from."""

from collections.abc import Sequence

import numpy as np

from engine.core.step import Masks
from engine.grammar.guide import AllBut, AlsoAllowed, Choice
from engine.grammar.matcher import Allowed, Matcher

WORD_TOKENS = 32


def mask_words(vocab_size: int) -> int:
    """The length of a mask."""
    return -(-vocab_size // WORD_TOKENS)


def masks_of(choices: Sequence[Choice], banned: Sequence[Sequence[int]], n_words: int) -> Masks:
    """One mask of so many words for each choice, whose matchers have been answered.

    A token that is banned stays out, unless no other is left: what a grammar asks for wins over
    `min_tokens`.
    """
    bits = np.zeros((len(choices), n_words), dtype=np.int32)
    for row, choice in enumerate(choices):
        match choice:
            case Matcher():
                bits[row] = _answered(choice)
            case AlsoAllowed(matcher, token_ids):
                bits[row] = _answered(matcher)
                for token_id in token_ids:
                    _allow(bits[row], token_id)
            case AllBut(token_ids=token_ids):
                bits[row] = -1
                _ban(bits[row], token_ids)
            case int():
                _allow(bits[row], choice)
            case None:
                bits[row] = -1
    for row, tokens in enumerate(banned):
        _ban(bits[row], tokens)
    return bits


def _answered(matcher: Matcher) -> Masks | int:
    """The matcher's mask; no token where its grammar is complete or has failed."""
    assert matcher.answer is not None, "the matcher has not been answered"
    return matcher.answer.mask if isinstance(matcher.answer, Allowed) else 0


def _allow(words: Masks, token_id: int) -> None:
    """Ignores tokens that the model does not have: a row without any other then fails alone."""
    if token_id < WORD_TOKENS * len(words):
        words.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)


def _ban(words: Masks, tokens: Sequence[int]) -> None:
    left = words.view(np.uint32).copy()
    for token_id in tokens:
        left[token_id // 32] &= np.uint32(~(1 << token_id % 32) & 0xFFFFFFFF)
    if left.any():
        words[:] = left.view(np.int32)
