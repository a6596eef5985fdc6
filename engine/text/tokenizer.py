"""The tokenizer of a checkpoint, as the server and the detokenizer use it."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from tokenizers import Encoding, Tokenizer

from engine.api import PromptTooLong
from engine.text.byte_level import byte_level_bytes
from engine.text.control_tokens import ControlTokens, new_mark
from engine.text.replays import Outline
from engine.text.templates import template_of
from engine.values.model import NO_REPLAYS, ModelCard, RenderedChat, Replay, TemplateKind

if TYPE_CHECKING:  # importing transformers takes a second
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

_SPACE = "▁"  # SentencePiece's space

_REFUSALS = (
    *(TemplateError, TypeError, KeyError, IndexError, AttributeError, RecursionError),
    ArithmeticError,  # of the template's own sums, and of a range that the sandbox bounds
    *(AssertionError, NotImplementedError),  # raised by mlx-lm's templates in Python
)

USUAL_CHARACTERS = 4
"""Characters of a token: a text of no more for each token of the limit is likely to fit."""

SLICE_CHARACTERS = 1 << 17
"""Characters of a long text that are tokenized at once to count its tokens."""

CUT_TOKENS = 64
"""More tokens than a cut through a text adds to it."""


class CheckpointTokenizer:
    """Implements `Tokenizer` with the Rust tokenizer inside transformers' tokenizer.

    Texts are encoded with its batch calls: only those let other Python threads run.

    Safe in several threads: the Rust objects do not change after the constructor, and rendering a
    template (transformers' sandboxed Jinja) keeps no state.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        kind: TemplateKind,
        max_tokens: int,
        placeholder: int | None = None,
    ) -> None:
        """Texts of more than `max_tokens` tokens are refused with PromptTooLong. `placeholder` is
        the token that the template writes for an image.
        """
        self._backend = tokenizer.backend_tokenizer
        # transformers switches these on and off around its own calls, which is not thread-safe.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._limit = PromptLimit(self._backend, max_tokens)
        self._template = template_of(tokenizer, kind)
        self._control_tokens = ControlTokens(self._backend, placeholder)
        self.image_stand_in = self._control_tokens.image
        added = self._backend.get_added_tokens_decoder()
        self._added: dict[int, str] = {id: token.content for id, token in added.items()}
        self.added_tokens = {token.content: id for id, token in added.items()}
        self.special_tokens = frozenset(token.content for token in added.values() if token.special)
        self.chat_template = self._template.source
        self._byte_level = _is_byte_level(self._backend.to_str())

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self._limit.check_text(text)
        return self._encode(text, add_special_tokens=add_special_tokens)

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
        return self._encode((first, second), add_special_tokens=True)

    def _encode(self, text: str | tuple[str, str], *, add_special_tokens: bool) -> list[int]:
        encoding = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding[0].ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._backend.decode_batch([list(token_ids)], skip_special_tokens=False)[0]
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of one token; empty for ids outside the tokenizer's vocabulary."""
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
        with self._refusals():
            return self._encode_conversation(list(messages), replays, template_arguments)

    def render_with_images(
        self,
        messages: Sequence[Mapping[str, object]],
        images: Sequence[Sequence[int]],
        replays: Mapping[int, Replay] = NO_REPLAYS,
        /,
        **template_arguments: object,
    ) -> RenderedChat:
        shown = list(messages)
        with self._refusals():
            strings = self._checked_strings(shown, template_arguments)
            written = self._control_tokens.written_in(list(dict.fromkeys(strings)))
            text, mark, replayed = self._rendered(
                shown, replays, template_arguments, strings, written
            )
            return self._control_tokens.encode_with_images(text, mark, replayed, images)

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """Raises ValueError for what a template raises, and where there is none."""
        if not self._template.source:
            raise ValueError("the model has no chat template; /v1/completions takes any prompt")
        try:
            yield
        except SecurityError as error:  # no other messages would help
            raise ValueError(f"the chat template does what no template may: {error}") from error
        except _REFUSALS as error:
            raise ValueError(f"the chat template refuses the messages: {error}") from error

    def _encode_conversation(
        self,
        messages: list[Any],
        replays: Mapping[int, Replay],
        arguments: Mapping[str, object],
    ) -> list[int]:
        strings = self._checked_strings(messages, arguments)
        written = self._control_tokens.written_in(list(dict.fromkeys(strings)))
        if not written and not replays:
            return self._encode(self._render(messages, arguments), add_special_tokens=False)
        text, mark, replayed = self._rendered(messages, replays, arguments, strings, written)
        return self._control_tokens.encode(text, mark, replayed)

    def _checked_strings(
        self, messages: Sequence[Any], arguments: Mapping[str, object]
    ) -> list[str]:
        """All strings of the callers. Raises PromptTooLong."""
        strings = list(_strings([messages, arguments]))
        self._limit.check_characters(sum(map(len, strings)))
        return strings

    def _rendered(
        self,
        messages: Sequence[Any],
        replays: Mapping[int, Replay],
        arguments: Mapping[str, object],
        strings: Sequence[str],
        written: Sequence[str],
    ) -> tuple[str, str, list[tuple[int, ...]]]:
        """The rendered messages, with a mark in the control tokens that callers have `written`; the
        mark; and the tokens of replayed answers.
        """
        mark = new_mark(strings)
        marked = {text: self._control_tokens.marked(text, mark) for text in written}
        shown, arguments = _replaced(messages, marked), _replaced(arguments, marked)
        text = self._render(shown, arguments)
        text, replayed = self._with_stand_ins(text, shown, replays, arguments)
        return text, mark, replayed

    def _with_stand_ins(
        self,
        text: str,
        messages: list[Any],
        replays: Mapping[int, Replay],
        arguments: Mapping[str, object],
    ) -> tuple[str, list[tuple[int, ...]]]:
        """The rendered messages with stand-ins for replayed answers, and the answers' tokens."""
        if not replays:
            return text, []
        self._limit.check_tokens(sum(len(replay.tokens) for replay in replays.values()))
        outline = Outline(messages, replays)
        try:
            rendered = self._template.render_any(outline.messages, arguments)
            self._limit.check_text(rendered)
            return outline.spliced(text, rendered, messages, self._control_tokens.replay)
        except (*_REFUSALS, ValueError):  # the template cannot render answers without their calls
            return text, []

    def _render(self, messages: Sequence[Any], arguments: Mapping[str, Any]) -> str:
        text = self._template.render(messages, arguments)
        self._limit.check_text(text)
        return text


def open_tokenizer(card: ModelCard) -> CheckpointTokenizer:
    """The tokenizer of a model that another process has loaded, read from its checkpoint."""
    return CheckpointTokenizer(
        pretrained_tokenizer(card.checkpoint),
        card.template,
        card.max_sequence_tokens,
        card.images.placeholder if card.images else None,
    )


def pretrained_tokenizer(checkpoint: str) -> Any:
    """transformers' tokenizer of a checkpoint. Raises whatever transformers raises."""
    from transformers import AutoTokenizer  # noqa: PLC0415 - takes a second

    return with_any_config(lambda extra: AutoTokenizer.from_pretrained(checkpoint, **extra))


def with_any_config(load: Callable[[Mapping[str, Any]], T]) -> T:
    """What `load` returns, which gets a tokenizer from transformers with extra arguments.

    transformers also reads config.json for a tokenizer, and rejects what it does not know there,
    such as a new type of layer. `load` is then called again with an empty configuration in its
    place. If that fails, too, the first error is raised.
    """
    try:
        return load({})
    except Exception as error:
        from transformers import PreTrainedConfig  # noqa: PLC0415 - takes a second

        try:
            return load({"config": PreTrainedConfig()})
        except Exception:
            raise error from None


class PromptLimit:
    """Refuses texts of more than `tokens` tokens.

    Tokenizing takes 200 bytes of memory and more for each character, so the tokens of a text that
    is not likely to fit are counted first, slice by slice, up to the limit.
    """

    def __init__(self, backend: Tokenizer, tokens: int) -> None:
        self._backend = backend
        self._tokens = tokens
        longest_token = max(map(len, backend.get_vocab()), default=1)
        self._most_characters = 2 * longest_token  # of a token: some tokenizers drop the spaces

    def check_characters(self, characters: int) -> None:
        """Raise PromptTooLong if this many characters are too many even in the longest tokens."""
        self.check_tokens(-(-characters // self._most_characters))

    def check_tokens(self, tokens: int) -> None:
        """Raise PromptTooLong if this many tokens are over the limit."""
        if tokens > self._tokens:
            raise PromptTooLong(tokens)

    def check_text(self, text: str) -> None:
        """Raise PromptTooLong if the text is far over the limit."""
        self.check_characters(len(text))
        if len(text) <= self._tokens * USUAL_CHARACTERS:
            return
        at_least_tokens = 0
        for start in range(0, len(text), SLICE_CHARACTERS):
            piece = text[start : start + SLICE_CHARACTERS]
            encoding = self._backend.encode_batch_fast([piece], add_special_tokens=False)[0]
            at_least_tokens += max(len(encoding) - CUT_TOKENS, 0)
            self.check_tokens(at_least_tokens)


def _strings(value: object) -> Iterator[str]:
    """All strings in nested lists and mappings, keys included."""
    match value:
        case str():
            yield value
        case Mapping():
            for key, item in value.items():
                yield from _strings(key)
                yield from _strings(item)
        case list() | tuple():
            for item in value:
                yield from _strings(item)


def _replaced(value: Any, replacements: Mapping[str, str]) -> Any:
    """The value with its strings replaced, in nested lists and mappings, keys included."""
    match value:
        case str():
            return replacements.get(value, value)
        case Mapping():
            return {
                _replaced(key, replacements): _replaced(item, replacements)
                for key, item in value.items()
            }
        case list() | tuple():
            return [_replaced(item, replacements) for item in value]
        case _:
            return value


def _beginning(encoding: Encoding, most_tokens: int) -> list[int]:
    """The first `most_tokens` token ids. The text is cut, not the special tokens after it."""
    ids: list[int] = encoding.ids
    is_special: list[int] = encoding.special_tokens_mask
    after = next((at for at, special in enumerate(reversed(is_special)) if not special), 0)
    text, around = ids[: len(ids) - after], ids[len(ids) - after :]
    return (text[: max(most_tokens - after, 0)] + around)[:most_tokens]


def _is_byte_level(tokenizer_json: str) -> bool:
    """Whether the tokenizer's decoder, or one in its sequence, is ByteLevel."""
    decoder = json.loads(tokenizer_json).get("decoder") or {}
    return any(part["type"] == "ByteLevel" for part in decoder.get("decoders", [decoder]) if part)
