"""From sampled tokens to text, and to the reason why a sequence ends."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from engine.output.detokenizer import Detokenizer
from engine.values.output import FinishReason
from engine.values.request import Request


@dataclass(frozen=True, slots=True)
class Checked:
    """Text that may be shown, and the stop string that ended it, if one did."""

    text: str
    stopped_by: str | None = None


class StopChecker:
    """Finds the first stop string to be completed, however the text is cut into pieces.

    Text that may still turn out to be the beginning of a stop string is held back: at most one
    character less than the longest of them. When several end at the same character the longest
    counts, so no part of a stop string is ever shown. A character costs what stop strings it
    begins or goes on with, not what there are. Nothing may be added after a stop. Raises
    ValueError for an empty stop string.
    """

    __slots__ = ("_begun", "_by_first", "_held")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._begun: list[_Matcher] = []
        self._by_first: dict[str, list[_Matcher]] = defaultdict(list)
        for matcher in map(_Matcher, stops):
            self._by_first[matcher.stop[0]].append(matcher)
        self._held = ""

    def add(self, text: str) -> Checked:
        """Take the next piece; return what has become safe to show."""
        if not self._by_first:
            return Checked(text)
        seen = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            if complete := self._advance(character):
                stop = max(complete, key=len)
                self._held = ""
                return Checked(seen[: end - len(stop)], stop)
        held = max((matcher.matched for matcher in self._begun), default=0)
        self._held = seen[len(seen) - held :]
        return Checked(seen[: len(seen) - held])

    def finish(self) -> str:
        """What was held back, when the sequence ended for another reason."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> list[str]:
        """The stop strings that the character completes."""
        for matcher in self._begun:
            matcher.advance(character)
        still_begun = [matcher for matcher in self._begun if matcher.matched]
        for matcher in self._by_first.get(character, ()):
            if not matcher.matched:  # else it has taken the character above
                matcher.advance(character)
                still_begun.append(matcher)
        self._begun = still_begun
        return [matcher.stop for matcher in still_begun if matcher.is_complete()]


class _Matcher:
    """The Knuth-Morris-Pratt automaton of one string.

    `matched` is the length of the longest suffix of the text so far that begins the string.
    """

    __slots__ = ("_borders", "matched", "stop")

    def __init__(self, stop: str) -> None:
        if not stop:
            raise ValueError("a stop string must not be empty")
        self.stop = stop
        self.matched = 0
        self._borders = _borders(stop)

    def is_complete(self) -> bool:
        return self.matched == len(self.stop)

    def advance(self, character: str) -> None:
        """Take one more character of text. Not to be called on a complete match."""
        while self.matched and self.stop[self.matched] != character:
            self.matched = self._borders[self.matched - 1]
        self.matched += self.stop[self.matched] == character


def _borders(string: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(string)
    for end in range(1, len(string)):
        border = borders[end - 1]
        while border and string[border] != string[end]:
            border = borders[border - 1]
        borders[end] = border + (string[border] == string[end])
    return borders


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text that became safe to show, and why the sequence ends with it, if it does."""

    text: str
    finish_reason: FinishReason | None = None
    stopped_by: str | int | None = None  # the stop string, or the stop token's id


class Output:
    """Turns one sequence's tokens into text. `add` is called with every sampled token, in order."""

    __slots__ = ("_detokenizer", "_n_tokens", "_request", "_stop", "_stop_token_ids")

    def __init__(
        self, request: Request, stop_token_ids: frozenset[int], detokenizer: Detokenizer
    ) -> None:
        self._request = request
        self._stop_token_ids = stop_token_ids
        self._detokenizer = detokenizer
        self._stop = StopChecker(request.stop)
        self._n_tokens = 0

    def add(self, token_id: int) -> TextDelta:
        """The text that the token completes. A stop token has none."""
        self._n_tokens += 1
        if token_id in self._stop_token_ids:
            return self._end("", FinishReason.STOP, token_id)
        text = self._detokenizer.add(token_id)
        if self._n_tokens < self._request.sampling.min_tokens:
            return TextDelta(text)  # where a stop string cannot end it
        checked = self._stop.add(text)
        if checked.stopped_by is not None:
            return TextDelta(checked.text, FinishReason.STOP, checked.stopped_by)
        if self._n_tokens < self._request.max_tokens:
            return TextDelta(checked.text)
        return self._end(checked.text, FinishReason.LENGTH)

    def complete(self) -> TextDelta:
        """The rest of the text, where nothing may follow the last token."""
        return self._end("", FinishReason.STOP)

    def _end(self, text: str, reason: FinishReason, stopped_by: int | None = None) -> TextDelta:
        """`text` and all that is still held back, unless a stop string is in it."""
        rest = self._stop.add(self._detokenizer.finish())
        if rest.stopped_by is not None:
            return TextDelta(text + rest.text, FinishReason.STOP, rest.stopped_by)
        return TextDelta(text + rest.text + self._stop.finish(), reason, stopped_by)


class OutputFactory:
    """Makes the Output of each new sequence."""

    def __init__(
        self, eos_token_ids: frozenset[int], new_detokenizer: Callable[[Request], Detokenizer]
    ) -> None:
        self._eos_token_ids = eos_token_ids
        self._new_detokenizer = new_detokenizer

    def stop_token_ids(self, request: Request) -> frozenset[int]:
        """The tokens that end this request."""
        eos = frozenset[int]() if request.ignore_eos else self._eos_token_ids
        return eos | request.stop_token_ids

    def new(self, request: Request) -> Output:
        return Output(request, self.stop_token_ids(request), self._new_detokenizer(request))
