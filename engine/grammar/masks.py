"""The masks of a step: the tokens that its guided rows may sample, as bits."""

from collections.abc import Sequence

import numpy as np

from engine.core.step import Masks
from engine.grammar.matcher import Allowed
from engine.grammar.state import AllBut, Choice, GrammarChoice

WORD_TOKENS = 32


def mask_words(vocab_size: int) -> int:
    """The length of a mask, in words of 32 tokens."""
    return -(-vocab_size // WORD_TOKENS)


def masks_of(choices: Sequence[Choice], banned: Sequence[Sequence[int]], n_words: int) -> Masks:
    """One mask for each choice, `[choices, n_words]`. The choices' matchers have been answered.

    Tokens that are `banned` in a row are masked unless no other is left: the grammar wins over
    `min_tokens`. A row is empty if its grammar is complete or has failed.
    """
    masks = np.zeros((len(choices), n_words), dtype=np.int32)
    for words, choice, tokens in zip(masks, choices, banned, strict=True):
        match choice:
            case GrammarChoice(answer, others):
                assert answer is not None, "the matcher has not been answered"
                if isinstance(answer, Allowed):
                    words[:] = answer.mask
                for token_id in others:
                    _allow(words, token_id)
            case AllBut(token_ids):
                words[:] = -1
                _ban(words, token_ids)
            case int():
                _allow(words, choice)
            case None:
                words[:] = -1
        _ban(words, tokens)
    return masks


def _allow(words: Masks, token_id: int) -> None:
    """Set the token's bit. Ignores a token that the model does not have: a row without any other
    then fails alone.
    """
    if token_id < WORD_TOKENS * len(words):
        words.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)


def _ban(words: Masks, tokens: Sequence[int]) -> None:
    """Clear the tokens' bits, unless no bit would be left. Ignores tokens that the model does not
    have: a checkpoint may name such an end token.
    """
    left = words.view(np.uint32).copy()
    for token_id in tokens:
        if 0 <= token_id < WORD_TOKENS * len(words):
            left[token_id // 32] &= np.uint32(~(1 << token_id % 32) & 0xFFFFFFFF)
    if left.any():
        words[:] = left.view(np.int32)
