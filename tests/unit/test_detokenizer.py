"""What a client sees of tokens that are not whole characters."""

import pytest
from transformers import ByT5Tokenizer

from engine.output.text import WindowDetokenizer, detokenizer_factory
from engine.values.request import Request

FOX = "🦊".encode()


def bytes_as_text(token_ids: object) -> str:
    """A tokenizer in which every byte is a token."""
    assert isinstance(token_ids, list)
    return bytes(token_ids).decode("utf-8", errors="replace")


@pytest.fixture
def detokenizer() -> WindowDetokenizer:
    return WindowDetokenizer(bytes_as_text)


def test_a_character_comes_with_its_last_byte(detokenizer: WindowDetokenizer) -> None:
    assert [detokenizer.add(byte) for byte in FOX] == ["", "", "", "🦊"]
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("garbage", [b"\x80", b"\xf0", b"\xe4\xbd", b"\xf0\x9f\x98", b"\xff"])
def test_endless_invalid_bytes_are_shown_and_hide_nothing(
    detokenizer: WindowDetokenizer, garbage: bytes
) -> None:
    """Also where the run is long enough to be decoded in parts."""
    data = garbage * 100 + FOX
    assert "".join(detokenizer.add(byte) for byte in data) == data.decode(errors="replace")


def test_endless_invalid_bytes_are_decoded_in_short_windows() -> None:
    longest = 0

    def decode(token_ids: object) -> str:
        nonlocal longest
        assert isinstance(token_ids, list)
        longest = max(longest, len(token_ids))
        return bytes_as_text(token_ids)

    detokenizer = WindowDetokenizer(decode)
    for _ in range(1000):
        detokenizer.add(0x80)
    assert longest < 50


def test_ids_beyond_a_slow_tokenizers_vocabulary_have_no_text() -> None:
    tokenizer = ByT5Tokenizer()
    detokenizer = detokenizer_factory(tokenizer)(Request("r", (1,), 1))
    ids = [*tokenizer.encode("ab", add_special_tokens=False), len(tokenizer) + 1000]
    assert "".join(detokenizer.add(token_id) for token_id in ids) == "ab"
