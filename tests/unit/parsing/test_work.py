"""Reading an answer takes work in proportion to its length: characters looked at, counted."""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import cast

import pytest

from engine.values.output import OutputEvent
from server.generation.choice import Choice
from server.generation.plan import AnswerPlan
from server.parsing.answer import MarkedFormat, ReasoningFormat, ToolFormat
from server.parsing.formats import harmony
from server.parsing.formats.json_calls import HERMES, MISTRAL_ARGS
from server.parsing.formats.literal_calls import GEMMA4, LFM2
from server.parsing.formats.xml_calls import GLM45, QWEN3_CODER
from server.parsing.reader import AnswerPart, AnswerStream, Calls, Content, Reader, openai_id
from server.parsing.registry import TOOL_FORMATS, AnswerFormat

THINK = ReasoningFormat("<think>", "</think>")
N = 8000
PIECE = 4


class CountingReader(Reader):
    """Counts the characters that are there whenever the text is looked at or replaced."""

    looked_at = 0

    @property
    def _text(self) -> str:
        self.looked_at += len(self._seen)
        return self._seen

    @_text.setter
    def _text(self, text: str) -> None:
        self.looked_at += len(text)
        self._seen = text


def answered(tools: ToolFormat) -> AnswerFormat:
    return harmony.Harmony(tools) if tools is harmony.TOOLS else MarkedFormat(THINK, tools)


def work(tools: ToolFormat, text: str, piece: int) -> list[int]:
    """What it takes to read the text in pieces of this length, by piece, and to finish."""
    reader = CountingReader()
    calls = Calls({"f": {"type": "object", "properties": {"k": {"type": "string"}}}}, openai_id)
    stream = AnswerStream(reader, answered(tools).read(reader, calls))
    seen = [0]
    for at in range(0, len(text), piece):
        stream.add(text[at : at + piece])
        seen.append(reader.looked_at)
    stream.finish()
    return [after - before for before, after in pairwise([*seen, reader.looked_at])]


ANSWERS = {
    "content": (HERMES, "", "word "),
    "white space": (HERMES, "so", "\n"),
    "white space first": (HERMES, "", "\n"),
    "reasoning": (HERMES, "<think>", "word "),
    "arguments": (HERMES, '<tool_call>{"name": "f", "arguments": {"k": "', "word "),
    "arguments before the name": (HERMES, '<tool_call>{"arguments": {"k": "', "word "),
    "a key": (HERMES, '<tool_call>{"', "word "),
    "a name": (HERMES, '<tool_call>{"name": "', "word "),
    "a number": (HERMES, '<tool_call>{"name": "f", "arguments": ', "1234"),
    "behind a call": (MISTRAL_ARGS, '[TOOL_CALLS]f[ARGS]{"k": 1}', " "),
    "a bare value": (GEMMA4, "<|tool_call>call:f{k:", "word "),
    "a string": (GEMMA4, '<|tool_call>call:f{k:<|"|>', "word "),
    "a JSON string": (GEMMA4, '<|tool_call>call:f{k:"', "word "),
    "a Python string": (LFM2, "<|tool_call_start|>[f(k='", "word "),
    "white space behind a key": (LFM2, '<|tool_call_start|>[f("k"', " "),
    "a parameter": (GLM45, "<tool_call>f\n<arg_key>k</arg_key>\n<arg_value>", "word "),
    "white space in a parameter": (GLM45, "<tool_call>f\n<arg_key>k</arg_key><arg_value>a", "\n"),
    "an object": (GLM45, "<tool_call>f\n<arg_key>o</arg_key>\n<arg_value>", "[1],"),
    "broken lists": (
        GLM45,
        "<tool_call>f",
        '<arg_key>o</arg_key><arg_value>[\\"</arg_value>',  # a string that all others are inside of
    ),
    "lines": (QWEN3_CODER, "<tool_call><function=f><parameter=k>\n", "a\n"),
    "white space behind a name": (QWEN3_CODER, "<tool_call><function=f", " "),
    "between parameters": (QWEN3_CODER, "<tool_call><function=f>", "word "),
    "many members": (LFM2, "<|tool_call_start|>[f(k={", "'a':1, "),
}


@pytest.mark.parametrize("kind", ANSWERS)
@pytest.mark.parametrize("piece", [PIECE, 10 * N], ids=["pieces", "whole"])
def test_twice_the_answer_is_twice_the_work(kind: str, piece: int) -> None:
    tools, begin, repeated = ANSWERS[kind]

    def of(n: int) -> int:
        return sum(work(tools, begin + repeated * (n // len(repeated)), piece))

    assert of(2 * N) < 2.5 * of(N)


BEHIND = (
    "",
    "f",
    '{"',
    '{"id":[\\"',
    '[{"id":[\\"',
    '{"arguments":{\\"',
    '{"name":"f","arguments":{\\"',
)
"""The escaped quote opens a string for the reader that begins before it, and is inside of one for
all readers that began earlier: none of them comes to an end.
"""


def repeatable(tools: ToolFormat) -> Iterator[str]:
    """Markers of calls, each with the begin of what may be one."""
    at_first = [f"{THINK.begin}{THINK.end}{marker}" for marker in tools.leading]
    written = tools.syntax.opens + tools.syntax.begin
    for marker in sorted({*tools.begins, *at_first, written} - {""}):
        for behind in BEHIND:
            yield marker.removesuffix(behind[:1]) + behind


@pytest.mark.slow
@pytest.mark.parametrize("tools", TOOL_FORMATS.values(), ids=TOOL_FORMATS)
@pytest.mark.parametrize("end", ["", '"<'], ids=["open", "broken off"])
def test_markers_that_are_no_calls_are_read_a_bounded_number_of_times(
    tools: ToolFormat, end: str
) -> None:
    for repeated in repeatable(tools):
        once, twice = (
            work(tools, repeated * (n // len(repeated)) + end, 16 * PIECE) for n in (N, 2 * N)
        )
        assert sum(twice) < 2.5 * sum(once), repeated
        assert max(twice) < 1.5 * max(once), "no piece costs more the longer the answer is"


class Counted(str):
    """Counts the characters that are copied where texts are put together by two."""

    copied = 0
    __slots__ = ()

    def __add__(self, other: str) -> "Counted":
        Counted.copied += len(self) + len(other)
        return Counted(str.__add__(self, other))

    def __radd__(self, other: str) -> "Counted":
        Counted.copied += len(self) + len(other)
        return Counted(str.__add__(other, self))


class PlainPlan:
    """A plan without formats, and its stream: all text is content."""

    reasoning_end = "</think>"
    functions: Mapping[str, bytes] = {}

    def stream(self) -> "PlainPlan":
        return self

    def add(self, text: str) -> list[AnswerPart]:
        return [Content(text)]


def test_an_answer_is_put_together_once() -> None:
    Counted.copied = 0
    answer = Choice(cast(AnswerPlan, PlainPlan()), lambda turn, replay: None)
    for _ in range(2000):
        answer.feed([OutputEvent(request_id="r", index=0, text=Counted("word "))])
    assert answer.content == "word " * 2000
    assert Counted.copied < 20 * len(answer.content)
