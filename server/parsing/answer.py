"""Formats of answers: reasoning and tool calls between markers, and content around them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from engine.values.request import Markup
from server.parsing.lark import CallSyntax
from server.parsing.reader import (
    BrokenCall,
    CallBegun,
    Calls,
    Content,
    NewId,
    NotACall,
    Reader,
    Reading,
    Reasoning,
    openai_id,
)

ReadCalls = Callable[[Reader, str, Calls], Reading[None]]
"""Parses the calls after a marker, which is given, up to where content may follow.

Raises NotACall before anything is yielded: all from the marker on is content then.
"""

MAX_REPARSE_CHARACTERS = 1280
"""How many characters of a text that turns out to be no call are parsed again. The limit keeps the
work linear where many markers begin no call.

A name with all that may stand around it is shorter. Arguments before the name, as in Hermes 2, may
be longer.
"""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Reasoning between a `begin` and an `end` marker. `content` is what a model writes before the
    content that follows, and `around` what else it writes around it; neither is shown. Where calls
    follow, it writes `before_calls` after the `end`.
    """

    begin: str
    end: str
    content: str = ""
    around: Sequence[str] = ()
    before_calls: str = ""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Calls after one of the `begins` markers, and at the very beginning of an answer also after
    one of `leading`. `syntax` is how a grammar makes the model write them. In free text a grammar
    finds a marker by the tokenizer's added token, or by all usual spellings of its text. `ends`
    are the markers that end what each of `begins` has begun; "" where content never follows.
    """

    name: str
    begins: Sequence[str]
    read: ReadCalls
    syntax: CallSyntax
    leading: Sequence[str] = ()
    ends: Sequence[str] = ("",)
    new_id: NewId = openai_id
    found_by: Literal["token", "text"] = "token"


_SEPARATORS = (",", ";")
"""What models write between calls that stand side by side, besides white space."""


@dataclass(frozen=True, slots=True)
class MarkedFormat:
    """Reasoning, then content and calls; either may be missing from the family."""

    reasoning: ReasoningFormat | None
    tools: ToolFormat | None

    def markup(self, *, is_open: bool) -> Markup:
        """What in the text is no content, for an engine that looks for stop strings."""
        reasoning, tools = self.reasoning, self.tools
        spans = list[tuple[str, str]]()
        if reasoning:
            alone = [reasoning.end, *self._markup]
            spans += [(reasoning.begin, reasoning.end), *zip(alone, alone, strict=True)]
        if tools:
            spans += zip_longest(tools.begins, tools.ends, fillvalue=tools.ends[-1])
        opened = reasoning.end if reasoning and is_open else ""
        return Markup(tuple(spans), tuple(tools.leading) if tools else (), opened)

    def read(self, reader: Reader, calls: Calls, *, is_open: bool = False) -> Reading[None]:
        """Everything up to the end of the text. `is_open` where the prompt ends within reasoning.

        Markers of reasoning are never content: one that ends what is not open is dropped.
        """
        begins = [
            *self._thinks,
            *self._ends,
            *self._markup,
            *(self.tools.begins if self.tools else ()),
        ]
        if is_open:
            yield from self._read_reasoning(reader)
        marker = yield from self._leading(reader)
        has_content, before = False, ""
        while True:
            found = marker.lstrip()
            if found in self._thinks:
                yield from self._read_reasoning(reader)
                marker = yield from self._leading(reader)
            elif found in self._ends:
                if has_content:
                    reader.give_back(marker[: len(marker) - len(found)])
                else:
                    yield from reader.skip_space()
                marker = yield from self._leading(reader)
            elif found in self._markup:
                if not has_content:
                    yield from reader.skip_space()
                marker = yield from self._leading(reader)
            elif marker:
                is_call = yield from self._read_calls(reader, before, marker, calls)
                before, marker = (yield from self._next_call(reader)) if is_call else ("", "")
            if not marker:
                has_content, before = True, ""
                marker = yield from reader.until(begins, Content)
            if not marker:
                return

    @property
    def _thinks(self) -> Sequence[str]:
        return [self.reasoning.begin] if self.reasoning else []

    @property
    def _ends(self) -> Sequence[str]:
        return [self.reasoning.end] if self.reasoning else []

    @property
    def _markup(self) -> Sequence[str]:
        reasoning = self.reasoning
        return [*filter(None, (reasoning.content, *reasoning.around))] if reasoning else []

    def _leading(self, reader: Reader) -> Reading[str]:
        """The marker with which the answer begins, white space in front included; or ""."""
        tools = [*self.tools.begins, *self.tools.leading] if self.tools else []
        markers = [*self._thinks, *self._ends, *self._markup, *tools]
        if not markers:
            return ""
        space = yield from reader.skip_space()
        marker = yield from reader.starts(markers)
        if not marker:
            reader.give_back(space)
            return ""
        return space + marker

    def _next_call(self, reader: Reader) -> Reading[tuple[str, str]]:
        """The marker of a call directly after another, and what stands between; or nothing."""
        assert self.tools is not None
        space = yield from reader.skip_space()
        separator = yield from reader.starts(_SEPARATORS)
        more = (yield from reader.skip_space()) if separator else ""
        marker = yield from reader.starts([*self.tools.begins, *self.tools.leading])
        between = space + separator + more
        if marker:
            return between, marker
        if separator or reader.text:
            reader.give_back(between)
        return "", ""

    def _read_reasoning(self, reader: Reader) -> Reading[None]:
        """Reasoning up to its end. A marker that begins it once more is dropped."""
        assert self.reasoning is not None
        markers = [self.reasoning.end, self.reasoning.begin]
        while True:
            yield from reader.skip_space()
            found = yield from reader.until(markers, Reasoning)
            if found.lstrip() != self.reasoning.begin:
                break
        yield from reader.skip_space()

    def _read_calls(self, reader: Reader, before: str, marker: str, calls: Calls) -> Reading[bool]:
        """Whether the marker begins a call. If not, `before` is content, too."""
        assert self.tools is not None
        steps = self.tools.read(reader, marker.lstrip(), calls)
        return (yield from parse_or_backtrack(reader, before + marker, steps))


def parse_or_backtrack(reader: Reader, marker: str, steps: Reading[None]) -> Reading[bool]:
    """Runs the steps that parse calls, their marker consumed. If there turns out to be no call, the
    marker is content, the text after it is parsed again, and the result is False.

    Of long text only the last MAX_REPARSE_CHARACTERS are parsed again; all before them is content.
    A text that ends inside what may still become a call is content as it stands: what looks like a
    marker is text of the call's strings.
    """
    reader.record(marker)
    try:
        for part in steps:
            if isinstance(part, CallBegun):
                reader.forget()
            yield part
    except NotACall as failure:
        text = reader.forget()
        if text is not None:
            if reader.is_closed and not isinstance(failure, BrokenCall):
                yield Content(text + reader.take(len(reader.text)))
                return False
            content = text[: max(len(marker), len(text) - MAX_REPARSE_CHARACTERS)].rstrip()
            reader.give_back(text[len(content) :])
            yield Content(content)
            return False
    reader.forget()
    return True


def all_calls(reader: Reader, calls: Calls, end: str, steps: Reading[None]) -> Reading[bool]:
    """Runs the steps that parse calls up to `end`. What turns out to be no call after the first one
    is dropped with `end`, and the result is False. Raises NotACall where the first is none.
    """
    n_before = calls.begun
    try:
        yield from steps
    except NotACall:
        if calls.begun == n_before:
            raise
        yield from reader.collect([end])
        return False
    return True
