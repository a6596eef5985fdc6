"""Random texts that a grammar allows, to be judged by a validator that knows no grammars."""

import random
from collections.abc import Iterator

from llguidance import LLMatcher, LLTokenizer

MAX_TOKENS = 120
ENDS = (b'"', b"}", b"]", b'"}', b'"]')
"""Tokens that are taken more often, so that texts come to an end."""
LIKELY = 0.25


class Sampler:
    """Draws texts from one seed. A text that is longer than MAX_TOKENS counts as none."""

    def __init__(self, tokenizer: LLTokenizer, end_token: int, seed: int) -> None:
        self._tokenizer = tokenizer
        self._end_token = end_token
        self._random = random.Random(seed)
        size = tokenizer.vocab_size
        self._ends = [token for token in range(size) if tokenizer.decode_bytes([token]) in ENDS]

    def texts(self, grammar: LLMatcher, count: int) -> Iterator[str]:
        """At most `count` texts; some are drawn twice."""
        for _ in range(count):
            if (text := self._text(grammar.deep_copy())) is not None:
                yield text

    def _text(self, matcher: LLMatcher) -> str | None:
        tokens: list[int] = []
        for _ in range(MAX_TOKENS):
            mask = int.from_bytes(matcher.compute_bitmask(), "little")
            assert not matcher.is_error(), matcher.get_error()
            is_end = matcher.is_accepting()
            allowed = [at for at in range(self._tokenizer.vocab_size) if mask >> at & 1]
            allowed = [token for token in allowed if token != self._end_token]
            if is_end and (not allowed or self._random.random() < LIKELY):
                return self._tokenizer.decode_bytes(tokens).decode()
            ends = [token for token in self._ends if mask >> token & 1]
            is_near = ends and self._random.random() < LIKELY
            token = self._random.choice(ends if is_near else allowed)
            matcher.consume_token(token)
            tokens.append(token)
        return None
