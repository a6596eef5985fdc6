"""The tokenizer of a checkpoint, as the server and the detokenizer use it."""

import json
from collections.abc import Mapping, Sequence

from tokenizers import Encoding
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from engine.text.chat_template import ChatTemplate
from engine.text.prompt_limit import CUT_TOKENS, USUAL_CHARACTERS, PromptLimit
from engine.text.templates import template_of
from engine.values.model import NO_REPLAYS, ModelCard, Replay, TemplateKind

_SPACE = "▁"  # SentencePiece's space


class CheckpointTokenizer:
    """Implements `Tokenizer` on the Rust tokenizer below transformers' one.

    Texts go through its batch calls: only those let other Python threads run.

    Safe in several threads: the Rust objects are never changed after this constructor, and
    rendering a template (transformers' sandboxed Jinja) keeps no state.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, kind: TemplateKind, max_tokens: int
    ) -> None:
        """`max_tokens` bounds what is encoded."""
        self._backend = tokenizer.backend_tokenizer
        # transformers switches these on and off around its own calls, which is not thread-safe.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._limit = PromptLimit(self._backend, max_tokens)
        template = template_of(tokenizer, kind)
        self._template = ChatTemplate(template, self._backend, self._limit)
        added = self._backend.get_added_tokens_decoder()
        self._added: dict[int, str] = {id: token.content for id, token in added.items()}
        self.added_tokens = {token.content: id for id, token in added.items()}
        self.special_tokens = frozenset(token.content for token in added.values() if token.special)
        self.chat_template = template.source
        self._byte_level = _is_byte_level(self._backend.to_str())

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self._limit.check_text(text)
        encoding = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding[0].ids
        return ids

    def encode_beginning(
        self, text: str, most_tokens: int, *, add_special_tokens: bool
    ) -> list[int]:
        characters = most_tokens * USUAL_CHARACTERS
        while True:
            piece = text[:characters]
            encoding = self._backend.encode_batch([piece], add_special_tokens=add_special_tokens)[0]
            if len(piece) == len(text) or len(encoding) >= most_tokens + CUT_TOKENS:
                return _beginning(encoding, most_tokens)
            characters *= 2

    def encode_pair(self, first: str, second: str) -> list[int]:
        self._limit.check_text(first + second)
        encoding = self._backend.encode_batch_fast([(first, second)], add_special_tokens=True)
        ids: list[int] = encoding[0].ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._backend.decode_batch([list(token_ids)], skip_special_tokens=False)[0]
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of one token; empty for ids beyond the tokenizer's vocabulary."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token: str | None = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            return byte_level_bytes(token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])  # SentencePiece's byte fallback
        return token.replace(_SPACE, " ").encode()

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        replays: Mapping[int, Replay] = NO_REPLAYS,
        /,
        **template_arguments: object,
    ) -> list[int]:
        return self._template.encode(messages, replays, template_arguments)


def open_tokenizer(card: ModelCard) -> CheckpointTokenizer:
    """The tokenizer of a model that another process has loaded. Reads its checkpoint."""
    tokenizer = AutoTokenizer.from_pretrained(card.checkpoint)
    return CheckpointTokenizer(tokenizer, card.template, card.max_sequence_tokens)


def _beginning(encoding: Encoding, most_tokens: int) -> list[int]:
    """What is too much goes from the text, not from the special tokens around it."""
    ids: list[int] = encoding.ids
    is_special: list[int] = encoding.special_tokens_mask
    after = next((at for at, special in enumerate(reversed(is_special)) if not special), 0)
    text, around = ids[: len(ids) - after], ids[len(ids) - after :]
    return (text[: max(most_tokens - after, 0)] + around)[:most_tokens]


def _byte_of() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable character (GPT-2's `bytes_to_unicode`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }


BYTE_OF = _byte_of()
assert set(BYTE_OF) == set(ByteLevel.alphabet())


def byte_level_bytes(token: str) -> bytes:
    """Return the bytes of a byte-level token as the ByteLevel decoder reads them: a token with any
    character outside the byte alphabet is plain text.
    """
    if BYTE_OF.keys() >= set(token):
        return bytes(BYTE_OF[character] for character in token)
    return token.encode()


def _is_byte_level(tokenizer_json: str) -> bool:
    """Whether the tokenizer's decoder, or one in its sequence, is ByteLevel."""
    decoder = json.loads(tokenizer_json).get("decoder") or {}
    return any(part["type"] == "ByteLevel" for part in decoder.get("decoders", [decoder]) if part)
