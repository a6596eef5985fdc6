"""Pieces of text, put together, are the text of the tokens."""

from collections.abc import Callable, Sequence
from functools import cache

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from engine.output.text import REPLACEMENT, WindowDetokenizer, detokenizer_factory
from engine.values.request import Request
from engine.values.tokens import pack

CORPUS = [
    "The quick brown fox jumps over the lazy dog. don't, isn't, (well) -- 3.14\n\n\tindented",
    "naïve café, cafe\u0301, Ångström, Việt Nam, 你好，世界。日本語のテキスト 한국어",
    "emoji 😀😁🎉 👩‍👩‍👧‍👦 🇨🇭 👍🏽 and some more words to merge",
]
TEXTS = st.text(st.sampled_from(sorted(set("".join(CORPUS)) | set("🦊𝔘ßж\u0300"))), max_size=40)
SPECIAL = "<|end|>"


@cache
def byte_level() -> PreTrainedTokenizerFast:
    """As in GPT-2, Llama 3 and Qwen: bytes, merged within words, so characters may be split."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[SPECIAL],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 20, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@cache
def byte_fallback() -> PreTrainedTokenizerFast:
    """As in Llama 2 and Gemma: words with a leading mark, bytes for characters not known."""
    pieces = ["<unk>", SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz.,é世", "▁t", "▁th", "▁the", "an", "and"]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("a", "n"), ("an", "d")]
    vocabulary = {piece: token_id for token_id, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def pieces_of(
    tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], before: Sequence[int] = ()
) -> list[str]:
    """What each token gave, and last what the end gave."""
    detokenizer = detokenizer_factory(tokenizer)(
        Request("r", pack((1,)), 1, text_before=tuple(before))
    )
    return [*(detokenizer.add(token_id) for token_id in token_ids), detokenizer.finish()]


def encoded(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    token_ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return token_ids


def decoded(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(token_ids, skip_special_tokens=True)
    return text


@given(st.lists(st.integers(0, 399), max_size=80))
def test_any_byte_level_tokens_give_their_text(token_ids: list[int]) -> None:
    assert "".join(pieces_of(byte_level(), token_ids)) == decoded(byte_level(), token_ids)


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@given(text=TEXTS)
def test_text_is_given_as_soon_as_its_characters_are_complete(
    make: Callable[[], PreTrainedTokenizerBase], text: str
) -> None:
    tokenizer = make()
    token_ids = encoded(tokenizer, text)
    pieces = pieces_of(tokenizer, token_ids)
    assert "".join(pieces) == decoded(tokenizer, token_ids) == text
    so_far = ""
    for count, piece in enumerate(pieces[:-1], start=1):
        so_far += piece
        assert text.startswith(so_far)
        assert len(so_far) >= len(decoded(tokenizer, token_ids[:count]).rstrip(REPLACEMENT))


@given(before=st.lists(st.integers(0, 290), max_size=80), text=TEXTS)
def test_invalid_bytes_do_not_spoil_the_text_after_them(before: list[int], text: str) -> None:
    """Byte fallback rewrites a run of bytes as soon as one of them is invalid."""
    word = "the " + text
    token_ids = before + encoded(byte_fallback(), word)
    assert "".join(pieces_of(byte_fallback(), token_ids)).endswith(word)


@given(
    words=st.lists(st.sampled_from(["the", "and", "🦊🦊🦊", "\u0300"]), min_size=1),
    repeats=st.integers(1, 100),
)
def test_special_tokens_between_words_leave_the_text_as_it_is(
    words: list[str], repeats: int
) -> None:
    tokenizer = byte_fallback()
    ends = [tokenizer.convert_tokens_to_ids(SPECIAL)] * repeats
    mixed = [token_id for word in words for token_id in [*ends, *encoded(tokenizer, word)]]
    assert "".join(pieces_of(tokenizer, mixed)) == " ".join(words)


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@given(text=TEXTS, share=st.floats(0, 1))
def test_what_goes_on_with_a_text_is_all_that_the_text_lacks(
    make: Callable[[], PreTrainedTokenizerBase], text: str, share: float
) -> None:
    """The space of its first word, too."""
    tokenizer = make()
    token_ids = encoded(tokenizer, text)
    cut = round(share * len(token_ids))
    begun = decoded(tokenizer, token_ids[:cut])
    assume(REPLACEMENT not in begun and (begun or not cut))
    rest = "".join(pieces_of(tokenizer, token_ids[cut:], before=token_ids[:cut]))
    assert begun + rest == text


@given(
    repeats=st.lists(st.integers(0, 80), min_size=4, max_size=4),
    text=st.text(st.sampled_from("🦊𝔘ßж"), min_size=1, max_size=5),
    unknown=st.booleans(),
)
def test_tokens_without_text_within_a_character_leave_it_as_it_is(
    repeats: list[int], text: str, unknown: bool
) -> None:
    """Special tokens that are skipped, and ids that the vocabulary does not have."""
    tokenizer = byte_fallback()
    silent = 100_000 if unknown else tokenizer.convert_tokens_to_ids(SPECIAL)
    mixed = list[int]()
    for place, token_id in enumerate(encoded(tokenizer, text)):
        mixed += [token_id, *[silent] * repeats[place % len(repeats)]]
    assert "".join(pieces_of(tokenizer, mixed)) == text
    assert "".join(pieces_of(tokenizer, mixed[:2])) == decoded(tokenizer, mixed[:2])


@pytest.mark.parametrize("n_spaces", [1, 2, 7])
def test_a_word_after_spaces_alone_keeps_its_space(n_spaces: int) -> None:
    tokenizer = byte_fallback()
    spaces = [tokenizer.convert_tokens_to_ids("▁")] * n_spaces
    word = [tokenizer.convert_tokens_to_ids("▁the")]
    begun = decoded(tokenizer, spaces)
    rest = "".join(pieces_of(tokenizer, word, before=spaces))
    assert begun + rest == decoded(tokenizer, spaces + word)


def test_special_tokens_stand_between_a_text_and_what_goes_on_with_it() -> None:
    tokenizer = byte_fallback()
    token_ids, special = encoded(tokenizer, "the and"), encoded(tokenizer, SPECIAL)
    assert "".join(pieces_of(tokenizer, token_ids[1:], [token_ids[0], *special])) == " and"
    assert "".join(pieces_of(tokenizer, token_ids, special)) == "the and", "none begins a text"


def test_a_text_that_ends_within_a_character_is_no_context() -> None:
    token_ids = encoded(byte_fallback(), "the 🦊 and")
    cut = len(token_ids) - 4
    pieces = pieces_of(byte_fallback(), token_ids[cut:], before=token_ids[:cut])
    assert "".join(pieces) == f"{2 * REPLACEMENT} and"


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


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_ids_beyond_the_vocabulary_have_no_text(
    make: Callable[[], PreTrainedTokenizerBase],
) -> None:
    """A model's vocabulary may be padded beyond its tokenizer's."""
    tokenizer = make()
    ids = [*encoded(tokenizer, "the fox"), len(tokenizer) + 1000]
    assert "".join(pieces_of(tokenizer, ids)) == "the fox"
