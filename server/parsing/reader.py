"""Text that arrives in pieces, the generators that parse it, and the parts that they make of it."""

import re
from collections import deque
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import Any, TypeAlias, TypeVar
from uuid import uuid4

from server.parsing.parameters import Parameters, parameters


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's reasoning, which is not part of the answer's content."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The begin of a tool call. `index` counts an answer's calls from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A slice of a call's arguments. A call's slices, joined, are a JSON object."""

    index: int
    text: str


AnswerPart: TypeAlias = Content | Reasoning | CallBegun | CallArguments


class NotACall(Exception):
    """The text after a marker is no tool call. Nothing of it has been yielded.

    Where the reader is closed, the text has ended instead, inside what may still become one.
    """


class BrokenCall(NotACall):
    """The text after a marker has ended, and is too broken to be taken for the begin of a call."""


NewId = Callable[[str, int], str]
"""Makes a call's id from its function's name and its index."""


class Calls:
    """Makes the parts of an answer's calls, one call after the other.

    `tools` are the request's functions: name to JSON schema of the parameters.
    """

    def __init__(self, tools: Mapping[str, Mapping[str, Any]], new_id: NewId) -> None:
        self._tools = tools
        self._new_id = new_id
        self._latest: tuple[str, Parameters] | None = None  # of the function that is called
        self._ids = set[str]()
        self.begun = 0
        self.has_broken_json = False  # a value between tags began as JSON and was none

    def begin(self, name: str, id: str | None = None) -> CallBegun:
        """The next call. It has the id that the model wrote, unless another call of the answer has
        it. Raises NotACall for an empty name.
        """
        if not name:
            raise NotACall
        index = number = self.begun
        self.begun += 1
        while not id or id in self._ids:
            id, number = self._new_id(name, number), number + 1
        self._ids.add(id)
        return CallBegun(index, id, name)

    def begin_declared(self, name: str) -> CallBegun:
        """The next call, where no marker says that it is one. Raises NotACall for the name of a
        function that the request does not declare.
        """
        if not self.declares(name):
            raise NotACall
        return self.begin(name)

    def arguments(self, text: str) -> CallArguments:
        """A slice of the arguments of the call that began last."""
        return CallArguments(self.begun - 1, text)

    def parameter(self, name: str, key: str) -> Any:
        """The schema of a function's parameter; None where nothing says what it is."""
        if self._latest is None or self._latest[0] != name:
            self._latest = name, parameters(self.schema(name))
        return self._latest[1].of(key)

    def parameter_names(self, name: str) -> Collection[str]:
        """The names of a function's declared parameters."""
        self.parameter(name, "")
        return self._latest[1].declared.keys() if self._latest else ()

    def declares(self, name: str) -> bool:
        """Whether the request has a function of this name."""
        return name in self._tools

    def schema(self, name: str) -> Mapping[str, Any]:
        """The schema of a function's arguments; an empty one for a function that is unknown."""
        return self._tools.get(name, {})


def openai_id(name: str, index: int) -> str:
    """The form of OpenAI's ids."""
    return f"call_{uuid4().hex[:24]}"


def short_id(name: str, index: int) -> str:
    """Nine letters and digits, which is all that Mistral's templates take."""
    return uuid4().hex[:9]


def lower_id(name: str, index: int) -> str:
    """Ten small letters and digits, which Solar's models write."""
    return uuid4().hex[:10]


def indexed_id(name: str, index: int) -> str:
    """`functions.name:0`, which Kimi's templates expect."""
    return f"functions.{name}:{index}"


T = TypeVar("T")

Reading: TypeAlias = Generator[AnswerPart | None, None, T]
"""A parser as a generator: yields parts, or None to wait for more text; returns T.

It does not wait for a reader that is closed.
"""

_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"[\w.:/-]{1,256}")  # of a function, as models write them


SLICE_CHARACTERS = 256
"""How much of the text is visible at once: parsers look at all of it, however little they take."""


class Reader:
    """The text that has arrived and is not consumed.

    Only a slice of it is visible at a time, so that the work is linear in the text as long as
    parsers consume what they have looked at before they wait.
    """

    def __init__(self) -> None:
        self._text = ""
        self._later = deque[str]()  # what follows it, in slices
        self._record: list[str] | None = None  # what has been taken since `record`
        self._is_whole = False
        self._has_ended = False
        self._plain: tuple[Callable[[str], AnswerPart], re.Pattern[str]] | None = None
        """While `until` waits and holds nothing back: its part, and the first characters of its
        markers."""

    def plain_part(self, text: str) -> AnswerPart | None:
        """The part that all of this text is, the next to arrive, where none of it can belong to a
        marker: most text of most answers. None where it must be parsed.
        """
        if self._plain is None or self._later or self._record is not None:
            return None
        part, first_characters = self._plain
        if text[-1:].isspace() or first_characters.search(text):
            return None
        return part(text)

    def add(self, text: str) -> None:
        self._later.extend(_slices(text))

    def close(self) -> None:
        """No more text will come."""
        self._is_whole = True

    def advance(self) -> bool:
        """Make more text visible, or close the reader if no more will come. False when none has
        arrived.
        """
        if not self._later:
            is_end = self._is_whole and not self._has_ended
            self._has_ended = self._is_whole
            return is_end
        self._text += self._later.popleft()
        return True

    @property
    def is_closed(self) -> bool:
        """Whether the parser has waited at the end of the text, and no more will come.

        What fails before is no matter of the end: a whole text and one in pieces fail alike.
        """
        return self._has_ended

    @property
    def text(self) -> str:
        """The visible text."""
        return self._text

    def take(self, n_characters: int) -> str:
        """Consume that many characters, or as many as are visible."""
        taken, self._text = self._text[:n_characters], self._text[n_characters:]
        if self._record is not None and taken:
            self._record.append(taken)
        return taken

    def give_back(self, text: str) -> None:
        """Put back text that was consumed last. It is parsed as text that has just arrived."""
        self._has_ended = self._has_ended and not text
        self._text, *later = _slices(text + self._text) or [""]
        self._later.extendleft(reversed(later))
        if self._record is not None:
            _shorten(self._record, len(text))

    def record(self, text: str) -> None:
        """Record this text, which was consumed last, and what is consumed from now on."""
        self._record = [text]

    def forget(self) -> str | None:
        """Stop recording. Returns the recorded text, or None if nothing is being recorded."""
        record, self._record = self._record, None
        return None if record is None else "".join(record)

    def until(self, markers: Sequence[str], part: Callable[[str], AnswerPart]) -> Reading[str]:
        """Yield the text before the first of the markers, slice by slice, none of it a marker's.

        Consumes the marker and returns it with the white space in front of it, which is not
        yielded; "" where the text ends without one. Of markers that begin at the same character
        the longest counts.
        """
        space: list[str] = []
        while True:
            found = first_marker(self._text, markers)
            before = self.take(found[0] if found else len(self._text) - self._held(markers))
            is_certain = not found and (self.is_closed or not markers)  # what no marker can follow
            said = before if is_certain else before.rstrip()
            if said or (is_certain and space):
                yield part("".join((*space, said)))
                space = []
            if rest := before[len(said) :]:
                space.append(rest)
            if found:
                return "".join((*space, self.take(len(found[1]))))
            if self.is_closed:
                return ""
            if not self._text and not space:
                self._plain = part, _first_characters(tuple(markers))
            yield None
            self._plain = None

    def _held(self, markers: Sequence[str]) -> int:
        """The length of the end of the text that may be the beginning of a marker."""
        return 0 if self.is_closed else held_back(self._text, markers)

    def collect(self, markers: Sequence[str]) -> Reading[tuple[str, str]]:
        """The whole text before the first of the markers, and that marker, both consumed."""
        slices: list[str] = []
        while True:
            if (found := first_marker(self._text, markers)) is not None:
                slices.append(self.take(found[0]))
                return "".join(slices), self.take(len(found[1]))
            slices.append(self.take(len(self._text) - self._held(markers)))
            if self.is_closed:
                return "".join(slices), ""
            yield None

    def starts(self, options: Sequence[str]) -> Reading[str]:
        """Consume and return the longest option with which the text begins; "" for none."""
        while not self.is_closed and any(
            option.startswith(self._text) and option != self._text for option in options
        ):
            yield None
        found = [option for option in options if self._text.startswith(option)]
        return self.take(len(max(found, key=len, default="")))

    def name(
        self, separators: Sequence[str], pattern: re.Pattern[str] = _NAME
    ) -> Reading[tuple[str, str]]:
        """A name and the separator after it, both consumed, white space around the name dropped.

        Raises NotACall as soon as what stands there is no name, which is what the pattern matches.
        """
        yield from self.skip_space()
        name, space = "", list[str]()
        while True:
            found = first_marker(self._text, separators)
            seen = found[0] if found else len(self._text) - held_back(self._text, separators)
            said = self._text[:seen].rstrip()
            if said:
                name, space = "".join((name, *space, said)), []
            if (name or found or self.is_closed) and not pattern.fullmatch(name):
                raise NotACall
            space.append(self.take(seen)[len(said) :])
            if found:
                return name, self.take(len(found[1]))
            if self.is_closed:
                raise NotACall
            yield None

    def peek(self) -> Reading[str]:
        """The next character, not consumed; "" at the end."""
        while not self._text and not self.is_closed:
            yield None
        return self._text[:1]

    def skip_space(self) -> Reading[str]:
        """Consume white space, and return it."""
        skipped: list[str] = []
        while True:
            match = _SPACE.match(self._text)
            skipped.append(self.take(match.end() if match else 0))
            if self._text or self.is_closed:
                return "".join(skipped)
            yield None


@lru_cache
def _first_characters(markers: tuple[str, ...]) -> re.Pattern[str]:
    """Matches the first character of any marker."""
    return re.compile("|".join(re.escape(marker[0]) for marker in markers) or r"(?!)")


def _slices(text: str) -> list[str]:
    return [text[at : at + SLICE_CHARACTERS] for at in range(0, len(text), SLICE_CHARACTERS)]


def _shorten(slices: list[str], n_characters: int) -> None:
    """Drop as many characters from the end, or what there is."""
    while n_characters and slices:
        last = slices.pop()
        if len(last) > n_characters:
            slices.append(last[:-n_characters])
        n_characters -= min(len(last), n_characters)


def gathered(steps: Reading[T]) -> Reading[tuple[str, T]]:
    """The text of all Content that the steps yield, in place of it, and what they return."""
    slices: list[str] = []
    while True:
        try:
            part = next(steps)
        except StopIteration as stop:
            return "".join(slices), stop.value
        if part is None:
            yield None
        elif isinstance(part, Content):
            slices.append(part.text)


def first_marker(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """The position of the first marker, and the marker."""
    found = [(at, -len(marker), marker) for marker in markers if (at := text.find(marker)) >= 0]
    if not found:
        return None
    at, _, marker = min(found)
    return at, marker


def held_back(text: str, markers: Sequence[str]) -> int:
    """The length of the longest end of the text that may turn out to begin a marker."""
    longest = max((len(marker) for marker in markers), default=0)
    for length in range(min(longest - 1, len(text)), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0


class AnswerStream:
    """The parser of one answer. `steps` parses what `reader` is given."""

    def __init__(self, reader: Reader, steps: Reading[None]) -> None:
        self._reader = reader
        self._steps = steps

    def add(self, text: str) -> list[AnswerPart]:
        """The parts that this text completes."""
        if not text:
            return []
        if (part := self._reader.plain_part(text)) is not None:
            return [part]
        self._reader.add(text)
        return self._run()

    def finish(self) -> list[AnswerPart]:
        """The remaining steps when the answer has ended."""
        self._reader.close()
        return self._run()

    def _run(self) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        for part in self._steps:
            if part is not None:
                parts.append(part)
            elif not self._reader.advance():
                break
        return joined(parts)


def joined(parts: Sequence[AnswerPart]) -> list[AnswerPart]:
    """Consecutive parts of one kind joined into one."""
    result: list[AnswerPart] = []
    for _, same in groupby(parts, type):
        first, *others = same
        if isinstance(first, CallBegun) or not others:
            result += (first, *others)
        else:
            text = "".join(
                part.text for part in (first, *others) if not isinstance(part, CallBegun)
            )
            result.append(replace(first, text=text))
    return result
