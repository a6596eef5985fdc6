"""Tokens one at a time have the text that the tokenizer gives for all of them at once."""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from random import Random

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from engine.output.text import (
    REPLACEMENT,
    ByteLevelDetokenizer,
    Detokenizer,
    WindowDetokenizer,
    detokenizer_factory,
)
from engine.text.byte_level import BYTE_OF
from engine.values.request import Request
from engine.values.tokens import pack
from load_tests.tokenizer import build_tokenizer

DEMO_MODEL = Path(__file__).parents[2] / "engine" / "demo_model" / "tokenizer.json"
TEXT = "The quick brown fox, naïve café: 你好，世界 🦊👩‍👩‍👧 don't\n\n\tcafe\u0301 \ufffd Việt Nam "
SPECIAL = "<|end|>"
ADDED = ("<tool>", "two words", " led", "é", "Ġ", "🦊 fox", "<｜▁｜>")
"""Added tokens that are no special ones. The decoder reads `é` and `Ġ` as bytes."""

EDGES = tuple(
    bytes.fromhex("00 41 7F 80 8F 90 9F A0 BF C0 C1 C2 DF E0 E1 EC ED EE EF F0 F1 F3 F4 F5 FF")
)
"""The first and the last byte of each class of bytes in well-formed UTF-8."""


def with_tokens_added(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(SPECIAL, normalized=False), "<s p>"])
    tokenizer.add_tokens([AddedToken(each, normalized=False) for each in ADDED])
    return tokenizer


def gpt2() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[SPECIAL],
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 20, trainer)
    return with_tokens_added(tokenizer)


def gpt2_with(decoder: decoders.Decoder | None) -> Tokenizer:
    tokenizer = gpt2()
    tokenizer.decoder = decoder
    return tokenizer


BYTE_LEVEL: dict[str, Callable[[], Tokenizer]] = {
    "gpt2": gpt2,
    "sequence": lambda: gpt2_with(decoders.Sequence([decoders.ByteLevel()])),
    "fused": lambda: gpt2_with(decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])),
    "load test": lambda: with_tokens_added(build_tokenizer(2_000)),
    "demo model": lambda: Tokenizer.from_file(str(DEMO_MODEL)),
}


def sentencepiece(*more: decoders.Decoder) -> Tokenizer:
    pieces = ["<unk>", SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    pieces += [*"abcdefghijklmnopqrstuvwxyz.,é世", "▁t", "▁th", "▁the", "an", "and", "▁▁"]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("a", "n"), ("an", "d"), ("▁", "▁")]
    vocabulary = {piece: token_id for token_id, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    shared = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*shared, *more])
    tokenizer.add_special_tokens(["<unk>", SPECIAL])
    tokenizer.add_tokens(["<tool>", "two words"])
    return tokenizer


def wordpiece() -> Tokenizer:
    pieces = ["[UNK]", SPECIAL, "the", "an", "##d", "##s", ",", "don", "'", "t"]
    vocabulary = {piece: token_id for token_id, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.add_special_tokens([SPECIAL])
    return tokenizer


WINDOWED: dict[str, Callable[[], Tokenizer]] = {
    "gemma": sentencepiece,
    "llama 2": lambda: sentencepiece(decoders.Strip(" ", 1, 0)),
    "wordpiece": wordpiece,
    "stripped": lambda: gpt2_with(
        decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    ),
    "fused before": lambda: gpt2_with(decoders.Sequence([decoders.Fuse(), decoders.ByteLevel()])),
    "byte level twice": lambda: gpt2_with(
        decoders.Sequence([decoders.ByteLevel(), decoders.ByteLevel()])
    ),
    "no decoder": lambda: gpt2_with(None),
}


class Vocabulary:
    """A tokenizer, the detokenizers that are made for it, and what they have to equal."""

    def __init__(self, backend: Tokenizer, skip_special_tokens: bool) -> None:
        self.tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=backend, clean_up_tokenization_spaces=True
        )
        self.skip = skip_special_tokens
        self._new = detokenizer_factory(self.tokenizer)

    def detokenizer(self, before: Sequence[int] = ()) -> Detokenizer:
        return self._new(
            Request("r", pack((1,)), 1, text_before=tuple(before), skip_special_tokens=self.skip)
        )

    def text(self, token_ids: Sequence[int], before: Sequence[int] = ()) -> str:
        detokenizer = self.detokenizer(before)
        return "".join(map(detokenizer.add, token_ids)) + detokenizer.finish()

    def decoded(self, token_ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(
            list(token_ids),
            skip_special_tokens=self.skip,
            clean_up_tokenization_spaces=False,  # the engine never does
        )
        return text

    def encoded(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.backend_tokenizer.encode(text).ids
        return ids


@cache
def vocabulary(name: str, skip_special_tokens: bool) -> Vocabulary:
    return Vocabulary({**BYTE_LEVEL, **WINDOWED}[name](), skip_special_tokens)


skipping = pytest.mark.parametrize("skip", [True, False], ids=["skipped", "shown"])
byte_level = pytest.mark.parametrize("name", BYTE_LEVEL)
windowed = pytest.mark.parametrize("name", WINDOWED)


@byte_level
def test_these_vocabularies_are_decoded_without_a_window(name: str) -> None:
    assert isinstance(vocabulary(name, True).detokenizer(), ByteLevelDetokenizer)


@windowed
def test_these_vocabularies_are_decoded_in_a_window(name: str) -> None:
    assert isinstance(vocabulary(name, True).detokenizer(), WindowDetokenizer)


@skipping
@byte_level
def test_every_token_and_every_token_within_a_character(name: str, skip: bool) -> None:
    """Also ids beyond the vocabulary, which have no text."""
    subject = vocabulary(name, skip)
    first, second = (
        subject.tokenizer.convert_tokens_to_ids(letter)
        for letter, byte in BYTE_OF.items()
        if byte in {0xE2, 0x82}
    )
    for token_id in range(len(subject.tokenizer) + 3):
        for ids in ([token_id], [first, token_id, second], [first, second, token_id]):
            assert subject.text(ids) == subject.decoded(ids)


@byte_level
def test_any_bytes_have_the_replacement_characters_of_the_whole(name: str) -> None:
    subject = vocabulary(name, True)
    letters = {byte: letter for letter, byte in BYTE_OF.items()}
    ids = {byte: subject.tokenizer.convert_tokens_to_ids(letters[byte]) for byte in EDGES}
    assert len(set(ids.values())) == len(EDGES)
    for run in product(ids.values(), repeat=3):
        assert subject.text(run) == subject.decoded(run)


@skipping
@byte_level
def test_random_tokens(name: str, skip: bool) -> None:
    """Among them bytes, special and added tokens more often than chance would have them."""
    subject, random = vocabulary(name, skip), Random(f"{name}/{skip}")
    size = len(subject.tokenizer)
    added = list(subject.tokenizer.backend_tokenizer.get_added_tokens_decoder())
    bytes_alone = [subject.tokenizer.convert_tokens_to_ids(letter) for letter in BYTE_OF]
    invalid = 0
    for _ in range(600):
        pools: list[Sequence[int]] = random.choice(
            [[range(size)], [bytes_alone], [range(size), added, bytes_alone]]
        )
        ids = [random.choice(random.choice(pools)) for _ in range(random.randrange(40))]
        assert subject.text(ids) == subject.decoded(ids)
        invalid += REPLACEMENT in subject.decoded(ids)
    assert 50 < invalid < 600, "some are whole characters, some are not"


@skipping
@byte_level
def test_no_more_than_an_incomplete_character_is_held_back(name: str, skip: bool) -> None:
    subject = vocabulary(name, skip)
    ids = subject.encoded(TEXT * 3)
    detokenizer, text = subject.detokenizer(), ""
    for count, token_id in enumerate(ids, start=1):
        text += detokenizer.add(token_id)
        whole = subject.decoded(ids[:count])
        assert whole.startswith(text)
        assert whole[len(text) :] in {"", REPLACEMENT}


@skipping
@byte_level
def test_a_text_that_goes_on_after_whole_characters(name: str, skip: bool) -> None:
    subject = vocabulary(name, skip)
    ids = subject.encoded(TEXT.replace(REPLACEMENT, ""))
    for cut in range(len(ids)):
        begun = subject.decoded(ids[:cut])
        if REPLACEMENT not in begun:
            assert begun + subject.text(ids[cut:], before=ids[:cut]) == subject.decoded(ids)


@skipping
@windowed
def test_every_token_in_a_window(name: str, skip: bool) -> None:
    subject = vocabulary(name, skip)
    for token_id in range(len(subject.tokenizer) + 3):
        assert subject.text([token_id]) == subject.decoded([token_id])


@skipping
@pytest.mark.parametrize("name", ["gemma", "llama 2"])
def test_text_in_a_window(name: str, skip: bool) -> None:
    """Of words, bytes of characters, special and added tokens."""
    subject, random = vocabulary(name, skip), Random(name)
    texts = ["the", " and", "🦊", "世", " ", ".", SPECIAL, "<tool>", "two words", "\u0300"]
    for _ in range(300):
        ids = subject.encoded("".join(random.choices(texts, k=random.randrange(12))))
        assert subject.text(ids) == subject.decoded(ids)


@skipping
@pytest.mark.parametrize("name", ["gemma", "llama 2"])
def test_invalid_bytes_in_a_window(name: str, skip: bool) -> None:
    """Runs without a valid byte. Where a run has one, the decoder makes it U+FFFD as soon as an
    invalid one follows, and what has been returned cannot be taken back.
    """
    subject, random = vocabulary(name, skip), Random(name)
    ids_of = subject.tokenizer.convert_tokens_to_ids
    invalid = [ids_of(f"<0x{byte:02X}>") for byte in (*range(0x80, 0xC0), *range(0xF8, 0x100))]
    words = [subject.encoded(word) for word in ("the", " and", "🦊", SPECIAL, "<tool>")]
    for _ in range(300):
        ids = list[int]()
        for word in random.choices([*words[:2], words[-1]], k=random.randrange(4)):
            ids += word + random.choices(invalid, k=random.randrange(5))
        ids += [*words[0], *words[2], *words[0], *words[3], *random.choices(invalid, k=3)]
        assert subject.text(ids) == subject.decoded(ids)


@skipping
@pytest.mark.parametrize("name", ["wordpiece", "stripped", "no decoder"])
def test_random_tokens_in_a_window(name: str, skip: bool) -> None:
    subject, random = vocabulary(name, skip), Random(name)
    for _ in range(300):
        ids = random.choices(range(len(subject.tokenizer)), k=random.randrange(40))
        assert subject.text(ids) == subject.decoded(ids)
