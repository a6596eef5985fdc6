"""Reading an answer takes work in proportion to its length: characters looked at, counted."""

from collections.abc import Sequence
from typing import cast

import pytest

from engine.types import OutputEvent
from server.generation.answer import ChatAnswer
from server.generation.events import UsageMeter
from server.generation.plan import AnswerPlan
from server.parsing.answer import MarkedFormat, ReasoningFormat, ToolFormat
from server.parsing.calls import Calls, openai_id
from server.parsing.formats.gemma_calls import GEMMA4
from server.parsing.formats.json_calls import HERMES, MISTRAL_ARGS
from server.parsing.formats.pythonic_calls import LFM2
from server.parsing.formats.xml_calls import GLM45, QWEN3_CODER
from server.parsing.parts import Content, Part
from server.parsing.reader import Reader
from server.parsing.stream import AnswerStream

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


def work(tools: ToolFormat, pieces: Sequence[str]) -> int:
    reader = CountingReader()
    calls = Calls({"f": {"type": "object", "properties": {"k": {"type": "string"}}}}, openai_id)
    format = MarkedFormat(THINK, tools)
    stream = AnswerStream(reader, format.read(reader, calls))
    for piece in pieces:
        stream.add(piece)
    stream.finish()
    return reader.looked_at


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
        text = begin + repeated * (n // len(repeated))
        return work(tools, [text[at : at + piece] for at in range(0, len(text), piece)])

    assert of(2 * N) < 2.5 * of(N)


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


class Told:
    """A plan, and a stream that gives what comes as it is."""

    reasoning_end = "</think>"

    def stream(self) -> "Told":
        return self

    def add(self, text: str) -> list[Part]:
        return [Content(text)]


def test_an_answer_is_put_together_once() -> None:
    Counted.copied = 0
    answer = ChatAnswer(cast(AnswerPlan, Told()), UsageMeter(1), lambda said, replay: None)
    for _ in range(2000):
        answer.add(OutputEvent(request_id="r", index=0, text=Counted("word ")))
    assert answer.content == "word " * 2000
    assert Counted.copied < 20 * len(answer.content)
