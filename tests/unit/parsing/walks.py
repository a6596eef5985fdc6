"""Random texts that a grammar allows, as a model writes them that knows nothing else."""

import random
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer

_FILE = Path(__file__).parents[3] / "engine" / "demo_model" / "tokenizer.json"
_END = 2
_VOCABULARY = 1024
_FREE = 100  # tokens: where more are allowed, the text is free
_TOKENIZER = LLTokenizer(_FILE.read_text(encoding="utf-8"), n_vocab=_VOCABULARY, eos_token=[_END])
_FIRST = [_TOKENIZER.decode_str([token])[:1] for token in range(_VOCABULARY)]


def walk(grammar: str, seed: int, closes: Sequence[str | int], most: int = 900) -> list[int] | None:
    """Random tokens up to the grammar's end; None if that does not come.

    Free text is often ended by one of `closes`, texts or special tokens: chance alone seldom does.
    """
    rng = random.Random(seed)
    matcher = LLMatcher(_TOKENIZER, LLMatcher.grammar_from_lark(grammar))
    assert not matcher.is_error(), matcher.get_error()
    ends = [[end] if isinstance(end, int) else _TOKENIZER.tokenize_str(end) for end in closes]
    tokens: list[int] = []
    while not matcher.is_stopped():
        if len(tokens) > most:
            return None
        chosen = _choose(matcher, rng, ends)
        if chosen == [_END]:
            break
        matcher.consume_tokens(chosen)
        assert not matcher.is_error(), matcher.get_error()
        tokens += chosen
    return tokens


def text_of(tokens: Sequence[int]) -> str:
    return _TOKENIZER.decode_str(list(tokens))


def _choose(matcher: LLMatcher, rng: random.Random, ends: Sequence[list[int]]) -> list[int]:
    mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")[:_VOCABULARY])
    if len(allowed) > _FREE and rng.random() < 0.3:
        fitting = [end for end in ends if matcher.validate_tokens(end) == len(end)]
        if fitting:
            return rng.choice(fitting)
    closing = [token for token in allowed if _FIRST[token] in {'"', "}", "]", "<"}]
    if closing and rng.random() < 0.5:
        return [int(rng.choice(closing))]
    return [int(rng.choice(allowed))]


MARKERS = {"<tool_call>": 1022, "</tool_call>": 1023}
"""The vocabulary's added tokens."""


def allows(grammar: str, text: str) -> bool:
    """Whether the grammar allows this text, up to its end, its markers as their tokens."""
    tokens: list[int] = []
    for piece in re.split(f"({'|'.join(MARKERS)})", text):
        tokens += [MARKERS[piece]] if piece in MARKERS else _TOKENIZER.tokenize_str(piece)
    matcher = LLMatcher(_TOKENIZER, LLMatcher.grammar_from_lark(grammar))
    assert not matcher.is_error(), matcher.get_error()
    return matcher.validate_tokens(tokens) == len(tokens)
