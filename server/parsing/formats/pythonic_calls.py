"""Calls as Python writes them, in a list: `[name(key="value", other=1)]`."""

import re

from server.parsing.answer import ReadCalls, ToolFormat
from server.parsing.calls import Calls
from server.parsing.lark import CallSyntax
from server.parsing.literal_lark import keyword_call
from server.parsing.literals import Notation, read_members
from server.parsing.python_strings import read_python_string
from server.parsing.reader import NotACall, Reader, Reading

_NOTATION = Notation(dict.fromkeys(['"', "'", '"""', "'''"], read_python_string), lists=("[", "("))
_KEY = r"[^=()\[\]{},\"'<]{1,256}"
_ODD_KEY = r"\"(?:[^\"\\]|\\.){0,256}"  # grammars write what Python has no form for
_FIRST = re.compile(rf"\)|(?:{_KEY}|{_ODD_KEY}\"\s{{0,64}})=[^=]")
_MAY_BE_FIRST = re.compile(rf"(?:{_KEY})?=?|{_ODD_KEY}\\?(?:\"\s{{0,64}}=?)?")


def _reader(end: str) -> ReadCalls:
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
    _reader("<|tool_call_end|>"),
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
    _reader("<|python_end|>"),
    CallSyntax(keyword_call, opens="[", between=", ", closes="]"),
    leading=["["],
)
"""The list in place of an answer: Llama 4, and 3.2's small ones."""
