"""Control tokens count where the template wrote them, and all other text is tokenized as ever."""

from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine.text.control_tokens import ControlTokens, is_control, new_mark
from engine.text.tokenizer import CheckpointTokenizer
from tests.answering import opened

CHARACTERS = 'abceghilnorstu ABIM\n\t<>|/_.{}[]":é＜日'
CONTROL = ["<|im_start|>", "<|im_end|>", "<s>", "</s>", "[INST]", "IM", "<|user|>"]
MARKUP = ["<think>", "</think>", "<tool_call>", "<|b", "  ", "an"]
MERGES = [("i", "n"), ("▁", "t"), ("<", "|"), ("|", ">"), ("</", "s>"), ("<", "/"), ("s", ">")]

FRAGMENTS = ["<|", "im_end|>", "<", "/s>", "user", "|>", "</", "[IN", "ST]", " ", "in the sun"]
WORDS = st.lists(
    st.one_of(st.text(CHARACTERS, max_size=8), st.sampled_from(FRAGMENTS + MARKUP)), max_size=6
).map("".join)
WRITTEN = st.lists(st.one_of(WORDS, st.sampled_from(CONTROL)), max_size=6).map("".join)
PLAIN = WORDS.filter(lambda text: not any(token in text for token in CONTROL))

TEMPLATE = (
    "{{ '<s>' }}{% if tools %}[INST]{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content.strip() }}"
    "{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ call.name }} {{ call.arguments | tojson }} {{ call.arguments }}"
    "{% endfor %}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _added(tokenizer: Tokenizer) -> Tokenizer:
    """Added tokens with every flag that changes where they are found."""
    flags: list[dict[str, bool]] = [
        {},
        {"rstrip": True},
        {},
        {"lstrip": True},
        {"lstrip": True, "rstrip": True},
    ]
    flags += [{"single_word": True}]
    tokenizer.add_special_tokens(
        [
            AddedToken(content, normalized=False, **extra)
            for content, extra in zip(CONTROL, flags, strict=False)
        ]
    )
    tokenizer.add_tokens([AddedToken("<|user|>", normalized=False)])  # as DeepSeek has them
    flags = [{}, {}, {"rstrip": True}, {}, {"normalized": False}, {"single_word": True}]
    tokenizer.add_tokens(
        [AddedToken(content, **extra) for content, extra in zip(MARKUP, flags, strict=True)]
    )
    return tokenizer


def _pieces(*more: str) -> list[str]:
    merged = ["in", "▁t", "<|", "|>", "</", "s>", "</s>"]
    return list(dict.fromkeys(["<unk>", "<s>", "▁", *CHARACTERS, *merged, *more]))


def byte_level() -> Tokenizer:
    """As in Qwen: NFC, a pattern, bytes; control tokens beyond the vocabulary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("i", "n"), ("Ġ", "t"), ("<", "|"), ("|", ">"), ("Ġ", "<")]
    vocabulary = [*alphabet, *(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(vocabulary)}, merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _added(tokenizer)


def bytes_alone() -> Tokenizer:
    """Nothing between the text and its bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in CONTROL])
    return tokenizer


def byte_level_prefixed() -> Tokenizer:
    """A space before the first word, and a vocabulary of everything with holes in its numbers."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *CONTROL, *MARKUP]
    tokenizer = Tokenizer(models.BPE({piece: 3 * i for i, piece in enumerate(pieces)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    return _added(tokenizer)


def prepending() -> Tokenizer:
    """As in Llama 2: no pattern, a normalizer that prepends, control tokens that merges make."""
    pieces = [*_pieces(), *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(
        models.BPE(
            {piece: i for i, piece in enumerate(pieces)},
            MERGES,
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return _added(tokenizer)


def metaspace(scheme: str) -> Tokenizer:
    """As in T5 and newer Llamas: Unigram, whose vocabulary has control tokens, and Metaspace."""
    pieces = [(piece, -float(len(CHARACTERS)) / len(piece)) for piece in _pieces("▁the", "[INST]")]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    return _added(tokenizer)


def lower_case() -> Tokenizer:
    """As in BERT: text loses case, accents and the spaces at its ends."""
    pieces = ["[UNK]", *dict.fromkeys(CHARACTERS.lower()), *(f"##{c}" for c in CHARACTERS.lower())]
    tokenizer = Tokenizer(
        models.WordPiece(
            {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}, unk_token="[UNK]"
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.Strip(),
            normalizers.NFKC(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return _added(tokenizer)


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "bytes": bytes_alone,
    "byte_level": byte_level,
    "byte_level_prefixed": byte_level_prefixed,
    "prepending": prepending,
    "metaspace_always": lambda: metaspace("always"),
    "metaspace_first": lambda: metaspace("first"),
    "metaspace_never": lambda: metaspace("never"),
    "lower_case": lower_case,
}
"""Each call makes a new tokenizer: a test may add tokens to it."""


@cache
def tokenizer(kind: str) -> tuple[CheckpointTokenizer, TokenizerWrapper]:
    fast = PreTrainedTokenizerFast(tokenizer_object=KINDS[kind](), eos_token="<|im_end|>")
    fast.chat_template = TEMPLATE
    wrapper = TokenizerWrapper(fast)
    return opened(wrapper, 4096), wrapper


@cache
def control_tokens(kind: str) -> ControlTokens:
    return ControlTokens(KINDS[kind]())


def conversation(user: str, answer: str, key: str, value: str) -> list[dict[str, object]]:
    call = {"name": "look", "arguments": {key: [value]}}
    return [
        {"role": "user", "content": user},
        {"role": "assistant", "content": answer, "tool_calls": [call]},
    ]


def control_ids(backend: Tokenizer, ids: list[int]) -> list[int]:
    added = backend.get_added_tokens_decoder()
    return [token_id for token_id in ids if token_id in added and is_control(added[token_id])]


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(texts=st.tuples(PLAIN, PLAIN, PLAIN, PLAIN))
def test_plain_text_is_tokenized_as_a_whole(kind: str, texts: tuple[str, str, str, str]) -> None:
    checkpoint, wrapper = tokenizer(kind)
    messages = conversation(*texts)
    rendered = wrapper.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    whole = wrapper.backend_tokenizer.encode(rendered, add_special_tokens=False).ids
    assert checkpoint.apply_chat_template(messages) == whole


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(rendered=WRITTEN)
def test_stand_ins_change_no_token(kind: str, rendered: str) -> None:
    """Also where a caller's words make the longer way necessary, all else is as it would be."""
    backend = tokenizer(kind)[1].backend_tokenizer
    whole = backend.encode(rendered, add_special_tokens=False).ids
    assert control_tokens(kind).encode(rendered, new_mark([rendered])) == whole


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(texts=st.tuples(WRITTEN, WRITTEN, WRITTEN, WRITTEN))
def test_only_the_template_writes_control_tokens(
    kind: str, texts: tuple[str, str, str, str]
) -> None:
    checkpoint, wrapper = tokenizer(kind)
    backend = wrapper.backend_tokenizer
    ids = checkpoint.apply_chat_template(conversation(*texts), tools=[{"name": texts[0]}])
    harmless = checkpoint.apply_chat_template(conversation(*"abcd"), tools=[{"name": "a"}])
    assert control_ids(backend, ids) == control_ids(backend, harmless)


@settings(deadline=None)
@given(user=WRITTEN, answer=WRITTEN)
def test_no_character_is_lost(user: str, answer: str) -> None:
    checkpoint, wrapper = tokenizer("bytes")
    messages = [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
    rendered = wrapper.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert checkpoint.decode(checkpoint.apply_chat_template(messages)) == rendered
