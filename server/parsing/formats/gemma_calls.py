"""Gemma's calls: `call:name{key:value}`, with quotes of their own around strings."""

from server.parsing.answer import ReadCalls, ToolFormat
from server.parsing.calls import Calls
from server.parsing.json_text import decoded_string, json_string
from server.parsing.lark import CallSyntax
from server.parsing.literal_lark import braced_call
from server.parsing.literals import Notation, WriteJson, quoted, read_members
from server.parsing.reader import NotACall, Reader, Reading, held_back


def _read_plain(reader: Reader, quote: str, part: WriteJson) -> Reading[bool]:
    """Text up to the next quote, in which nothing is escaped."""
    yield part('"')
    while True:
        end = reader.text.find(quote)
        held = 0 if reader.is_closed else held_back(reader.text, [quote])
        if text := reader.take(end if end >= 0 else len(reader.text) - held):
            yield part(quoted(text))
        if end >= 0:
            reader.take(len(quote))
            yield part('"')
            return True
        if reader.is_closed:
            return False
        yield None


def _read_json(reader: Reader, quote: str, part: WriteJson) -> Reading[bool]:
    """A string as JSON writes it, when it is complete."""
    reader.give_back(quote)
    text, ended = yield from json_string(reader)
    if ended:
        try:
            text = f'"{quoted(decoded_string(text))}"'
        except NotACall:
            text = f'"{quoted(text)}"'
        yield part(text)
    return ended


def _gemma(name: str, begin: str, end: str, quote: str, answers: str) -> ToolFormat:
    """Calls between `begin` and `end`. `answers` is what a model writes behind the last of them,
    where it expects the results.
    """
    return ToolFormat(
        name,
        [begin],
        _reader(Notation({quote: _read_plain, '"': _read_json}), end, answers),
        CallSyntax(braced_call(quote), begin=f"{begin}call:", end=end),
    )


def _reader(notation: Notation, end: str, answers: str) -> ReadCalls:
    def read(reader: Reader, marker: str, calls: Calls) -> Reading[None]:
        first = calls.begun
        try:
            yield from _read_calls(reader, notation, calls)
        except NotACall:
            if calls.begun == first:
                raise
            yield from reader.collect([end])
            return
        yield from reader.starts([end])
        yield from reader.skip_space()
        yield from reader.starts([answers])

    return read


def _read_calls(reader: Reader, notation: Notation, calls: Calls) -> Reading[None]:
    """One call, and those side by side with it."""
    yield from reader.skip_space()
    if not (yield from reader.starts(["call:"])):
        raise NotACall
    while True:
        name, _ = yield from reader.name(["{"])
        yield calls.begin(name)
        yield from read_members(reader, notation, "}", ":", calls.arguments)
        yield from reader.skip_space()
        if not (yield from reader.starts(["call:"])):
            return


GEMMA4 = _gemma("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>")
"""`<|tool_call>call:name{key:<|"|>text<|"|>,other:1}<tool_call|>`."""

FUNCTION_GEMMA = _gemma(
    "functiongemma",
    "<start_function_call>",
    "<end_function_call>",
    "<escape>",
    "<start_function_response>",
)
"""`<start_function_call>call:name{key:<escape>text<escape>,other:1}<end_function_call>`."""
