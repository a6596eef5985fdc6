"""Token ids to text, one token at a time."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from engine.values.request import Request

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Decode = Callable[[Sequence[int]], str]
"""Text of some tokens."""

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What decoders write for bytes that are not UTF-8, or not yet."""

UNFINISHED_CHARACTERS = 3
"""Most replacement characters that an unfinished UTF-8 sequence decodes to: one for each byte."""

MAX_PENDING_TOKENS = 32
"""More tokens without complete text are a run of invalid bytes or of special tokens."""

KEPT_PENDING_TOKENS = 16
"""What stays of such a run: more bytes than the characters that may still change are made of."""

MAX_CONTEXT_TOKENS = 8
"""Among so many tokens of a text the last ones are whole characters, unless it ends within one."""


class Detokenizer(Protocol):
    """The text of one sequence as it grows. Never raises."""

    def add(self, token_id: int) -> str:
        """The text that this token completes: whole characters, or nothing yet."""
        ...

    def finish(self) -> str:
        """The rest, with U+FFFD for bytes that never became a character."""
        ...


def detokenizer_factory(
    tokenizer: "PreTrainedTokenizerBase",
) -> Callable[[Request], Detokenizer]:
    """A function that makes a detokenizer for one sequence, in a few microseconds.

    Special tokens have no text where the request skips them; ids without a token never have.
    """
    shown = _fast_decode if tokenizer.is_fast else _slow_decode
    text_alone, verbatim = shown(tokenizer, True), shown(tokenizer, False)

    def new(request: Request) -> Detokenizer:
        decode = text_alone if request.skip_special_tokens else verbatim
        return WindowDetokenizer(decode, _context(decode, request.text_before))

    return new


class WindowDetokenizer:
    """Decodes a short window of tokens and gives out what is new in it.

    A token's text depends on its neighbours (leading spaces, characters of several tokens), so
    the window is the tokens of the last piece given out, then those still incomplete. The idea
    is that of Text Generation Inference's prefix offset. `tokenizers.decoders.DecodeStream` takes
    half the time (1 us less), but cannot be flushed, and raises where an invalid byte undoes text.
    """

    __slots__ = ("_decode", "_given", "_pending", "_window")

    def __init__(self, decode: Decode, before: Sequence[int] = ()) -> None:
        """`before`: tokens of whole characters that the sequence goes on behind."""
        self._decode = decode
        self._window = list(before)
        self._pending = len(before)  # where in the window the incomplete tokens begin
        self._given = decode(self._window)  # beginning of its text that has been given out

    def add(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._text()
        complete = _complete(text)
        piece = complete[len(self._given) :]
        self._given += piece
        if piece and complete == text:
            self._move_window()
        elif len(self._window) - self._pending > MAX_PENDING_TOKENS:
            self._shorten_window()
        return piece

    def finish(self) -> str:
        rest = self._text()[len(self._given) :]
        self._window.clear()
        self._pending, self._given = 0, ""
        return rest

    def _text(self) -> str:
        """The window's text; it begins with what has been given out."""
        text = self._decode(self._window)
        if text.startswith(self._given):
            return text
        # With byte fallback, one invalid byte undoes the characters of the bytes before it.
        self._window = self._window[self._pending :]
        self._pending, self._given = 0, ""
        return self._decode(self._window)

    def _move_window(self) -> None:
        """All is complete: the tokens of the last piece become the context of the next."""
        self._window = self._window[self._pending :]
        self._pending = len(self._window)
        self._given = self._decode(self._window)

    def _shorten_window(self) -> None:
        """So many tokens complete no text: leave out the first, which cannot any more."""
        del self._window[self._pending : -KEPT_PENDING_TOKENS]
        self._given = _complete(self._decode(self._window))


def _context(decode: Decode, token_ids: Sequence[int]) -> Sequence[int]:
    """The fewest last tokens whose text is whole characters; none where a few have no such text.

    Behind these a word keeps its space, which many decoders take from the beginning of a text.
    """
    for count in range(1, min(len(token_ids), MAX_CONTEXT_TOKENS) + 1):
        text = decode(last := list(token_ids[-count:]))
        if text and REPLACEMENT not in text:
            return last
    return ()


def _complete(text: str) -> str:
    """The text without an end that the next bytes may change."""
    replacements = len(text) - len(text.rstrip(REPLACEMENT))
    return text[: len(text) - min(replacements, UNFINISHED_CHARACTERS)]


def _fast_decode(tokenizer: "PreTrainedTokenizerBase", skip_special_tokens: bool) -> Decode:
    backend = tokenizer.backend_tokenizer

    def decode(token_ids: Sequence[int]) -> str:
        text: str = backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    return decode


def _slow_decode(tokenizer: "PreTrainedTokenizerBase", skip_special_tokens: bool) -> Decode:
    known_tokens = len(tokenizer)  # a model's vocabulary may be padded beyond its tokenizer's

    def decode(token_ids: Sequence[int]) -> str:
        text: str = tokenizer.decode(
            [token_id for token_id in token_ids if token_id < known_tokens],
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        return text

    return decode
