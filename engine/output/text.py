"""Turns the sampled tokens of a sequence into text, and decides when and why the sequence ends."""

from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from engine.output.detokenizer import Detokenizer
from engine.values.output import FinishReason
from engine.values.request import Request


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

    __slots__ = ("_begun", "_by_first", "_held")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._begun: list[_Matcher] = []
        self._by_first: dict[str, list[_Matcher]] = defaultdict(list)
        for matcher in map(_Matcher, stops):
            self._by_first[matcher.stop[0]].append(matcher)
        self._held = ""

    def add(self, text: str) -> TextDelta:
        """Take the next piece of the text and return what is safe to show now."""
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
    """The text of one sequence. Call `add` with every sampled token, in order."""

    __slots__ = (
        "_detokenizer",
        "_max_tokens",
        "_min_tokens",
        "_n_tokens",
        "_stop",
        "stop_token_ids",
    )

    def __init__(
        self, request: Request, eos_token_ids: frozenset[int], detokenizer: Detokenizer
    ) -> None:
        eos = frozenset[int]() if request.ignore_eos else eos_token_ids
        self.stop_token_ids = eos | request.stop_token_ids
        self._max_tokens = request.max_tokens
        self._min_tokens = request.sampling.min_tokens
        self._detokenizer = detokenizer
        self._stop = StopChecker(request.stop) if request.stop else None
        self._n_tokens = 0

    def add(self, token_id: int) -> TextDelta:
        """Return the text that the token completes. A stop token has no text.

        Before `min_tokens`, stop strings are ignored.
        """
        self._n_tokens = n_tokens = self._n_tokens + 1
        if token_id in self.stop_token_ids:
            return self._end("", FinishReason.STOP, token_id)
        text = self._detokenizer.add(token_id)
        if self._stop is not None and n_tokens >= self._min_tokens:
            delta = self._stop.add(text)
            if delta.finish_reason is not None:
                return delta
            text = delta.text
        if n_tokens < self._max_tokens:
            return TextDelta(text)
        return self._end(text, FinishReason.LENGTH)

    def complete(self) -> TextDelta:
        """End the sequence after its last token, because its grammar is complete. Return the text
        that was held back.
        """
        return self._end("", FinishReason.STOP)

    def _end(self, text: str, reason: FinishReason, stopped_by: int | None = None) -> TextDelta:
        """Return `text` and the text that is held back, up to a stop string if it contains one."""
        text_left = self._detokenizer.finish()
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
