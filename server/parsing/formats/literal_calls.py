"""Formats of calls in notations of models' own: Gemma's, and Python's."""

import re

from server.parsing.answer import ReadCalls, ToolFormat
from server.parsing.call_grammars import braced_call, keyword_call
from server.parsing.json_values import decoded_string, json_string
from server.parsing.lark import CallSyntax
from server.parsing.literals import Notation, WriteJson, quoted, read_members, read_python_string
from server.parsing.reader import Calls, NotACall, Reader, Reading, held_back


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
        _gemma_reader(Notation({quote: _read_plain, '"': _read_json}), end, answers),
        CallSyntax(braced_call(quote), begin=f"{begin}call:", end=end),
    )


def _gemma_reader(notation: Notation, end: str, answers: str) -> ReadCalls:
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


_NOTATION = Notation(dict.fromkeys(['"', "'", '"""', "'''"], read_python_string), lists=("[", "("))
_KEY = r"[^=()\[\]{},\"'<]{1,256}"
_ODD_KEY = r"\"(?:[^\"\\]|\\.){0,256}"  # grammars write what Python has no form for
_FIRST = re.compile(rf"\)|(?:{_KEY}|{_ODD_KEY}\"\s{{0,64}})=[^=]")
_MAY_BE_FIRST = re.compile(rf"(?:{_KEY})?=?|{_ODD_KEY}\\?(?:\"\s{{0,64}}=?)?")


def _python_reader(end: str) -> ReadCalls:
    """Reads a list of calls, and `end` behind it."""

    def read(reader: Reader, marker: str, calls: Calls) -> Reading[None]:
        first = calls.begun
        try:
            yield from _read_list(reader, marker, calls)
        except NotACall:
            if calls.begun == first or marker == "[":
                raise
            yield from reader.collect([end])
            return
        yield from reader.skip_space()
        yield from reader.starts([end])

    return read


def _read_list(reader: Reader, marker: str, calls: Calls) -> Reading[None]:
    yield from reader.skip_space()
    if marker != "[" and not (yield from reader.starts(["["])):
        raise NotACall
    while True:
        name, _ = yield from reader.name(["("])
        if marker == "[" and not calls.declares(name):
            raise NotACall  # text may begin with a bracket, too
        yield from _check_arguments(reader)
        yield calls.begin(name)
        yield from read_members(reader, _NOTATION, ")", "=", calls.arguments)
        yield from reader.skip_space()
        if not (yield from reader.starts([","])):
            break
    yield from reader.starts(["]"])


def _check_arguments(reader: Reader) -> Reading[None]:
    """Raises NotACall unless there is none, or one with a keyword comes first."""
    yield from reader.skip_space()
    while not _FIRST.match(reader.text):
        if reader.is_closed or not _MAY_BE_FIRST.fullmatch(reader.text):
            raise NotACall
        yield None


LFM2 = ToolFormat(
    "lfm2",
    ["<|tool_call_start|>"],
    _python_reader("<|tool_call_end|>"),
    CallSyntax(
        keyword_call,
        opens="<|tool_call_start|>[",
        between=", ",
        closes="]<|tool_call_end|>",
    ),
)
"""`<|tool_call_start|>[name(key="value")]<|tool_call_end|>`: Liquid's LFM2."""

PYTHONIC = ToolFormat(
    "pythonic",
    ["<|python_start|>"],
    _python_reader("<|python_end|>"),
    CallSyntax(keyword_call, opens="[", between=", ", closes="]"),
    leading=["["],
)
"""The list in place of an answer: Llama 4, and 3.2's small ones."""
