"""XTC and DRY under llama.cpp's names, and the tokens that their texts stand for."""

from collections.abc import Sequence
from functools import cached_property, lru_cache, partial
from typing import Annotated

from pydantic import Field, StringConstraints

from engine.values.model import Tokenizer
from engine.values.request import Dry, Xtc
from server.generation.foreign_fields import ForeignSamplers

MAX_BREAKERS = 16
MAX_BREAKER_CHARACTERS = 40
MAX_BREAKER_TOKENS = 20  # llama.cpp's, as are the characters

Breaker = Annotated[str, StringConstraints(min_length=1, max_length=MAX_BREAKER_CHARACTERS)]


class SamplerFields(ForeignSamplers):
    """The samplers of llama.cpp that are served, and those that are refused."""

    xtc_probability: float = Field(0.0, ge=0, le=1)
    xtc_threshold: float = Field(0.1, ge=0, le=1)
    dry_multiplier: float = Field(0.0, ge=0, le=100, description="0: off.")
    dry_base: float = Field(1.75, ge=1, le=100)
    dry_allowed_length: int = Field(2, ge=0, le=2**31 - 1)
    dry_penalty_last_n: int = Field(
        -1, ge=-1, le=2**31 - 1, description="-1: all tokens of prompt and output; 0: off."
    )
    dry_sequence_breakers: list[Breaker] = Field(
        ["\n", ":", '"', "*"], max_length=MAX_BREAKERS, fail_fast=True
    )


def xtc_of(fields: SamplerFields, ends: frozenset[int], tokenizer: Tokenizer) -> Xtc:
    """What the fields say of XTC, which never leaves out line breaks and the tokens that end a
    text, as mlx-lm has it.
    """
    line_break = tokenizer.encode("\n", add_special_tokens=False)
    protected = tuple(sorted({*ends, *line_break}))
    return Xtc(fields.xtc_probability, fields.xtc_threshold, protected)


class BreakerTokens:
    """Finds the tokens with which texts that break repetitions begin, for one model."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._found = lru_cache(64)(self._find)

    def dry_of(self, fields: SamplerFields) -> Dry | None:
        """What the fields say of DRY, whose multiplier is above 0; None where it searches no
        tokens.
        """
        if not fields.dry_penalty_last_n:
            return None
        found = [self._found(breaker) for breaker in fields.dry_sequence_breakers]
        return Dry(
            fields.dry_multiplier,
            fields.dry_base,
            fields.dry_allowed_length,
            fields.dry_penalty_last_n,
            tuple(dict.fromkeys(tokens for one in found for tokens in one)),
        )

    @cached_property
    def _texts(self) -> Sequence[bytes]:
        """The text of each token. It takes some tenths of a second, and is kept from the first
        request with DRY on.
        """
        return [*map(self._tokenizer.token_bytes, range(self._vocab_size))]

    def _find(self, breaker: str) -> Sequence[tuple[int, ...]]:
        """The tokens that contain the breaker, and those that end with its beginning, with the
        tokens of its rest.
        """
        wanted, found = breaker.encode(), list[tuple[int, ...]]()
        beginnings = [wanted[:n] for n in range(len(wanted) - 1, 0, -1)]
        for token, text in enumerate(self._texts):
            if wanted in text:
                found.append((token,))
                continue
            for beginning in filter(text.endswith, beginnings):
                if (rest := self._rest(breaker, len(beginning))) is not None:
                    found.append((token, *rest))
        return found

    def _rest(self, breaker: str, n_bytes: int) -> Sequence[int] | None:
        """The tokens of a breaker without its first bytes. None where these end within a character
        and are no token of it: then the breaker is written in other tokens.
        """
        encode = partial(self._tokenizer.encode, add_special_tokens=False)
        try:
            return encode(breaker.encode()[n_bytes:].decode())[:MAX_BREAKER_TOKENS]
        except UnicodeDecodeError:
            first, *others = encode(breaker)
            is_first = len(self._texts[first]) == n_bytes
            return others[:MAX_BREAKER_TOKENS] if is_first else None
