"""Turns the sampled tokens of a sequence into text, one at a time, and decides when and why the
sequence ends.
"""

import json
from codecs import utf_8_decode
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from engine.output.content import ContentFinder, Run
from engine.output.loops import LoopFinder
from engine.text.byte_level import byte_level_bytes
from engine.values.output import FinishReason
from engine.values.request import TEXT_BEFORE_TOKENS, Request

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Decode = Callable[[Sequence[int]], str]
"""Decodes a run of tokens in one call of the tokenizer."""

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""Decoders write it for bytes that are not UTF-8, or that begin an unfinished character."""

UNFINISHED_CHARACTERS = 3
"""The most replacement characters that an unfinished character decodes to: one for each byte."""

MAX_PENDING_TOKENS = 32
"""More tokens than this without complete text are invalid bytes or special tokens."""

KEPT_PENDING_TOKENS = 16
"""Tokens that are kept of invalid bytes: they cover every character that may still change."""


class Detokenizer(Protocol):
    """Decodes the tokens of one sequence as they come. Never raises.

    All pieces together equal the tokenizer's text of all tokens. An incomplete character is held
    back. The clean-up of spaces that some checkpoints configure is never applied.
    """

    def add(self, token_id: int) -> str:
        """Return the text that this token completes: whole characters, or nothing."""
        ...

    def finish(self) -> str:
        """Return the text that is held back, with U+FFFD for bytes that are no character."""
        ...


def detokenizer_factory(
    tokenizer: "PreTrainedTokenizerBase",
) -> Callable[[Request], Detokenizer]:
    """Return a function that makes a request's detokenizer in a few microseconds.

    The tokenizer is a fast one: a model with any other is not loaded. Ids without a token have no
    text, nor have special tokens if the request skips them.
    """
    backend = tokenizer.backend_tokenizer
    if _joins_bytes(backend):
        pieces = {skip: TokenPieces(backend, skip) for skip in (True, False)}
        return lambda request: ByteLevelDetokenizer(pieces[request.skip_special_tokens])
    decodes = {skip: partial(backend.decode, skip_special_tokens=skip) for skip in (True, False)}
    has_text = {skip: _text_test(backend, skip) for skip in (True, False)}
    return lambda request: WindowDetokenizer(
        decodes[request.skip_special_tokens],
        request.text_before,
        has_text[request.skip_special_tokens],
    )


class TokenPieces(dict[int, str | bytes]):
    """The piece of text of each token of a byte-level vocabulary, computed at its first use.

    A token of whole characters is a `str`; one that begins or ends within a character is `bytes`.
    """

    def __init__(self, backend: Any, skip_special_tokens: bool) -> None:
        """`backend` is the Rust tokenizer, a `tokenizers.Tokenizer`."""
        super().__init__()
        self._id_to_token = backend.id_to_token
        added = backend.get_added_tokens_decoder().values()
        self._skipped = {each.content for each in added if each.special and skip_special_tokens}

    def __missing__(self, token_id: int) -> str | bytes:
        token: str | None = self._id_to_token(token_id)
        data = b"" if token is None or token in self._skipped else byte_level_bytes(token)
        try:
            piece: str | bytes = data.decode()
        except UnicodeDecodeError:
            piece = data
        self[token_id] = piece
        return piece


class ByteLevelDetokenizer:
    """Decodes the bytes of a byte-level vocabulary as UTF-8.

    The bytes of a token do not depend on its neighbours. So the tokenizer is not called, and text
    after whole characters needs no context.
    """

    __slots__ = ("_pending", "_pieces")

    def __init__(self, pieces: TokenPieces) -> None:
        self._pieces = pieces
        self._pending = b""  # the first bytes of a character

    def add(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        if isinstance(piece, str):
            if not self._pending:
                return piece
            piece = piece.encode()
        data = self._pending + piece
        text, n_decoded = utf_8_decode(data, "replace", False)
        self._pending = data[n_decoded:]
        return text

    def finish(self) -> str:
        rest, self._pending = self._pending, b""
        return rest.decode(errors="replace")


class WindowDetokenizer:
    """Decodes a short window of tokens at each token and returns the text that is new in it.

    A token's text may depend on its neighbours (leading spaces, characters of several tokens). So
    the window holds the tokens of the last piece returned and the incomplete tokens after them, as
    in Text Generation Inference. `tokenizers.decoders.DecodeStream` takes 1 us less a token, but it
    cannot be flushed, and it raises if an invalid byte changes the text before it.
    """

    __slots__ = ("_decode", "_given", "_has_text", "_pending", "_window")

    def __init__(
        self,
        decode: Decode,
        before: Sequence[int] = (),
        has_text: Callable[[int], bool] = lambda token_id: True,
    ) -> None:
        """`before` are the tokens of the text before the sequence's first token. Tokens that do not
        have text are left out of the window: `decode` skips them, and they may come between the
        bytes of a character.
        """
        self._decode = decode
        self._has_text = has_text
        self._window = _context(decode, before)
        self._pending = len(self._window)  # index of the first incomplete token in the window
        self._given = decode(self._window)  # the beginning of the window's text, returned already

    def add(self, token_id: int) -> str:
        if not self._has_text(token_id):
            return ""
        self._window.append(token_id)
        text = self._text()
        complete = _complete(text)
        piece = complete[len(self._given) :]
        self._given += piece
        if piece and complete == text:  # the last piece's tokens are the context of the next
            del self._window[: self._pending]
            self._pending = len(self._window)
            self._given = self._decode(self._window)
        elif len(self._window) - self._pending > MAX_PENDING_TOKENS:
            # The first of these tokens cannot become a character any more.
            del self._window[self._pending : -KEPT_PENDING_TOKENS]
            self._given = _complete(self._decode(self._window))
        return piece

    def finish(self) -> str:
        text = self._text()
        rest, self._given = text[len(self._given) :], text
        return rest

    def _text(self) -> str:
        """The window's text. It begins with the text that was returned."""
        text = self._decode(self._window)
        if text.startswith(self._given):
            return text
        # With byte fallback an invalid byte makes the characters of the bytes before it U+FFFD.
        del self._window[: self._pending]
        self._pending, self._given = 0, ""
        return self._decode(self._window)


def _context(decode: Decode, token_ids: Sequence[int]) -> list[int]:
    """The fewest last tokens whose text is whole characters; none if TEXT_BEFORE_TOKENS are not.
    If they have no text, all of them: a space at the beginning of a text.

    A word after these tokens keeps its space, which many decoders drop at the beginning of a text.
    """
    last, text = list[int](), ""
    for count in range(1, min(len(token_ids), TEXT_BEFORE_TOKENS) + 1):
        text = decode(last := list(token_ids[-count:]))
        if text and REPLACEMENT not in text:
            break
    return [] if REPLACEMENT in text else last


def _complete(text: str) -> str:
    """The text without the replacement characters at its end that the next bytes may change."""
    replacements = len(text) - len(text.rstrip(REPLACEMENT))
    return text[: len(text) - min(replacements, UNFINISHED_CHARACTERS)]


def _joins_bytes(backend: Any) -> bool:
    """Whether the Rust tokenizer's decoder only joins the bytes of byte-level tokens.

    That is so if it is ByteLevel alone, or ByteLevel and then Fuse, which joins the one string that
    ByteLevel returns. Other decoders may change the text.
    """
    if backend.decoder is None:
        return False
    decoder = json.loads(backend.decoder.__getstate__())
    kinds = [part["type"] for part in decoder.get("decoders", [decoder])]
    return kinds in (["ByteLevel"], ["ByteLevel", "Fuse"])


def _text_test(backend: Any, skip_special_tokens: bool) -> Callable[[int], bool]:
    """Return a function that says whether a token has text, next to others or alone. It has none if
    the vocabulary does not have it, or if it is a special token that is skipped.
    """
    skipped = frozenset[int]()
    if skip_special_tokens:
        added = backend.get_added_tokens_decoder().items()
        skipped = frozenset(token_id for token_id, token in added if token.special)
    return lambda token_id: token_id not in skipped and backend.id_to_token(token_id) is not None


class TextDelta(NamedTuple):
    """Text that is safe to show, and why the sequence ends with it; None if it does not end."""

    text: str
    finish_reason: FinishReason | None = None
    stopped_by: str | int | None = None  # the stop string, or the stop token's id


class StopChecker:
    """Finds the first stop string that is completed in a text that comes in pieces.

    Text that may be the beginning of a stop string is held back: at most one character less than
    the longest stop string. If several stop strings end at the same character, the longest counts,
    so no part of a stop string is ever shown. The time for a character depends on the stop strings
    that match there, not on how many there are. Nothing may be added after a stop. Raises
    ValueError for an empty stop string.
    """

    __slots__ = ("_begun", "_by_first", "_held", "stops")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.stops = stops
        self._begun: list[_Matcher] = []
        self._by_first: dict[str, list[_Matcher]] = defaultdict(list)
        for matcher in map(_Matcher, stops):
            self._by_first[matcher.stop[0]].append(matcher)
        self._held = ""

    def add(self, text: str) -> TextDelta:
        """Add the next piece of text and return the text that can be sent now."""
        begun, by_first = self._begun, self._by_first
        if not begun and by_first.keys().isdisjoint(text):
            return TextDelta(text)
        seen = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            for matcher in by_first.get(character, ()):
                if not matcher.matched:  # else it is in `begun` already
                    begun.append(matcher)
            begun = [matcher for matcher in begun if matcher.advance(character)]
            if complete := [one.stop for one in begun if one.matched == len(one.stop)]:
                stop = max(complete, key=len)
                self._held = ""
                return TextDelta(seen[: end - len(stop)], FinishReason.STOP, stop)
        self._begun = begun
        n_held = max((matcher.matched for matcher in begun), default=0)
        self._held = seen[len(seen) - n_held :]
        return TextDelta(seen[: len(seen) - n_held])

    def finish(self) -> str:
        """Return the text that is held back. Call it if the sequence ends for another reason."""
        held, self._held = self._held, ""
        return held


class _Matcher:
    """The Knuth-Morris-Pratt automaton of one stop string.

    `matched` is the length of the longest suffix of the text so far that begins the stop string.
    """

    __slots__ = ("_borders", "matched", "stop")

    def __init__(self, stop: str) -> None:
        if not stop:
            raise ValueError("a stop string must not be empty")
        self.stop = stop
        self.matched = 0
        self._borders = [0]  # length of each prefix's longest proper prefix that is also its suffix
        for character in stop[1:]:
            self._borders.append(self.advance(character))
        self.matched = 0

    def advance(self, character: str) -> int:
        """Take one more character of the text and return `matched`. Must not be called after the
        stop string is complete.
        """
        matched, stop = self.matched, self.stop
        while matched and stop[matched] != character:
            matched = self._borders[matched - 1]
        self.matched = matched + (stop[matched] == character)
        return self.matched


class Output:
    """The text of one sequence. Call `add` with every sampled token, in order.

    The model's own stop tokens end it wherever they come, and the client's stop strings and tokens
    in the content alone: not in reasoning or tool calls, which the request's `markup` tells.
    """

    __slots__ = (
        "_content",
        "_detokenizer",
        "_eos",
        "_loops",
        "_max_tokens",
        "_min_tokens",
        "_n_tokens",
        "_named_stops",
        "_stop",
        "stop_token_ids",
    )

    def __init__(
        self, request: Request, eos_token_ids: frozenset[int], detokenizer: Detokenizer
    ) -> None:
        eos = frozenset[int]() if request.ignore_eos else eos_token_ids
        self.stop_token_ids = eos | request.stop_token_ids | request.named_stops.keys()
        self._eos = eos
        self._named_stops = request.named_stops
        self._max_tokens = request.max_tokens
        self._min_tokens = request.sampling.min_tokens
        self._detokenizer = detokenizer
        self._stop = StopChecker(request.stop) if request.stop else None
        is_marked = request.markup and (request.stop or self.stop_token_ids != eos)
        self._content = ContentFinder(request.markup) if request.markup and is_marked else None
        self._loops = LoopFinder(request.loops) if request.loops is not None else None
        self._n_tokens = 0

    def add(self, token_id: int) -> TextDelta:
        """Return the text that the token completes. A stop token has no text.

        Before `min_tokens`, stop strings are ignored.
        """
        self._n_tokens = n_tokens = self._n_tokens + 1
        if token_id in self.stop_token_ids and (
            token_id in self._eos or self._content is None or self._content.is_content
        ):
            is_own = token_id in self._eos
            stopped_by = token_id if is_own else self._named_stops.get(token_id, token_id)
            return self._end("", FinishReason.STOP, stopped_by)
        text = self._detokenizer.add(token_id)
        if self._content is not None:
            delta = self._add_runs(self._content.add(text))
            if delta.finish_reason is not None:
                return delta
            text = delta.text
        elif self._stop is not None and n_tokens >= self._min_tokens:
            delta = self._stop.add(text)
            if delta.finish_reason is not None:
                return delta
            text = delta.text
        if self._loops is not None and self._loops.add(token_id):
            return self._end(text, FinishReason.REPETITION)
        if n_tokens < self._max_tokens:
            return TextDelta(text)
        return self._end(text, FinishReason.LENGTH)

    def complete(self) -> TextDelta:
        """End the sequence after its last token, because its grammar is complete. Return the text
        that was held back.
        """
        return self._end("", FinishReason.STOP)

    def _add_runs(self, runs: Sequence[Run]) -> TextDelta:
        """The text of these runs, up to a stop string in one that is content."""
        texts = list[str]()
        for run in runs:
            if self._stop is None or self._n_tokens < self._min_tokens:
                texts.append(run.text)
            elif not run.is_content:
                texts += (self._stop.finish(), run.text)
                self._stop = StopChecker(self._stop.stops)
            else:
                delta = self._stop.add(run.text)
                texts.append(delta.text)
                if delta.finish_reason is not None:
                    return TextDelta("".join(texts), delta.finish_reason, delta.stopped_by)
        return TextDelta("".join(texts))

    def _end(
        self, text: str, reason: FinishReason, stopped_by: int | str | None = None
    ) -> TextDelta:
        """Return `text` and the text that is held back, up to a stop string if it contains one."""
        text_left = self._detokenizer.finish()
        if self._content is not None:
            runs = [*self._content.add(text_left), *self._content.finish()]
            rest = self._add_runs(runs)
            if rest.finish_reason is not None:
                return TextDelta(text + rest.text, FinishReason.STOP, rest.stopped_by)
            held = self._stop.finish() if self._stop is not None else ""
            return TextDelta(text + rest.text + held, reason, stopped_by)
        if self._stop is not None:
            rest = self._stop.add(text_left)
            if rest.finish_reason is not None:
                return TextDelta(text + rest.text, FinishReason.STOP, rest.stopped_by)
            text_left = rest.text + self._stop.finish()
        return TextDelta(text + text_left, reason, stopped_by)


NewOutput: TypeAlias = Callable[[Request], Output]


def output_factory(
    eos_token_ids: frozenset[int], new_detokenizer: Callable[[Request], Detokenizer]
) -> NewOutput:
    """Return a function that makes the Output of one of a request's sequences."""
    return lambda request: Output(request, eos_token_ids, new_detokenizer(request))
