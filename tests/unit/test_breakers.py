"""The tokens of a text that breaks repetitions, in a vocabulary where tokens are longer than it."""

from collections.abc import Sequence
from typing import Any, cast

from engine.values.model import Tokenizer
from server.generation.sampler_fields import BreakerTokens, SamplerFields

TOKENS = [b"a", b"b", b"\n", b" a", b"x\ny", b"xab", b"xa", b"ab", "é".encode()[:1], b""]


class Words:
    """Takes the longest token at each place."""

    def token_bytes(self, token_id: int) -> bytes:
        return TOKENS[token_id]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        rest, found = text.encode(), list[int]()
        while rest:
            longest = max((one for one in TOKENS if one and rest.startswith(one)), key=len)
            found.append(TOKENS.index(longest))
            rest = rest[len(longest) :]
        return found


def breakers(*texts: str) -> Sequence[tuple[int, ...]]:
    fields: dict[str, Any] = {"dry_multiplier": 1.0, "dry_sequence_breakers": list(texts)}
    found = BreakerTokens(cast(Tokenizer, Words()), len(TOKENS))
    dry = found.dry_of(SamplerFields.model_validate(fields))
    assert dry is not None
    return dry.breakers


def test_a_token_that_contains_it_breaks() -> None:
    assert breakers("\n") == ((2,), (4,))


def test_a_token_that_ends_with_its_beginning_breaks_with_the_rest() -> None:
    assert breakers("ab") == ((0, 1), (3, 1), (5,), (6, 1), (7,))


def test_the_same_tokens_count_once() -> None:
    assert breakers("\n", "\n") == ((2,), (4,))
