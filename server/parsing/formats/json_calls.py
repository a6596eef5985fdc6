"""Families whose arguments are JSON, which passes on as it was written."""

import json
import re
from collections.abc import Callable
from dataclasses import replace

from server.parsing.answer import ReadCalls, ToolFormat, all_calls
from server.parsing.json_text import (
    drop_braces,
    read_arguments,
    read_declared_object,
    read_key,
    read_object,
)
from server.parsing.lark import (
    CallSyntax,
    Function,
    Lark,
    headed_call,
    json_arguments,
    json_call,
)
from server.parsing.reader import (
    Calls,
    NotACall,
    Reader,
    Reading,
    indexed_id,
    lower_id,
    short_id,
)


def enclosed_object(end: str) -> ReadCalls:
    """Reads an object, or several, after each marker, up to the `end` marker."""

    def read(reader: Reader, marker: str, calls: Calls) -> Reading[None]:
        if (yield from all_calls(reader, calls, end, _read_objects(reader, calls))):
            yield from reader.skip_space()
            yield from reader.starts([end])

    return read


def _read_bare(reader: Reader, marker: str, calls: Calls) -> Reading[None]:
    """An object with no marker but perhaps `<|python_tag|>`."""
    if marker == "{":
        reader.give_back(marker)
        yield from read_declared_object(reader, calls)
    else:
        yield from read_object(reader, calls)


def _read_objects(reader: Reader, calls: Calls) -> Reading[None]:
    """One object or more, with commas or white space between them."""
    while True:
        yield from read_object(reader, calls)
        yield from reader.skip_space()
        if (yield from reader.starts([","])):
            yield from reader.skip_space()
        if (yield from reader.peek()) != "{":
            return


def _read_mistral(reader: Reader, marker: str, calls: Calls) -> Reading[None]:
    """A list of objects, or one alone; or, since 2025, `name[ARGS]{...}`, perhaps with a
    `[CALL_ID]`.
    """
    yield from reader.skip_space()
    is_list = yield from reader.starts(["["])
    if is_list or (yield from reader.peek()) == "{":
        yield from _read_objects(reader, calls)
        yield from reader.starts(["]"])
        return
    name, separator = yield from reader.name(["[ARGS]", "[CALL_ID]", "{"])
    id = None
    if separator == "[CALL_ID]":
        id, separator = yield from reader.name(["[ARGS]", "{"])
    if separator == "{":
        reader.give_back(separator)
    yield calls.begin(name, id)
    yield from read_arguments(reader, calls)
    yield from drop_braces(reader)


def _listed(end: str) -> ReadCalls:
    """Reads a list of objects after each marker, or objects without its brackets, up to the `end`
    marker, which may be missing.
    """

    def objects(reader: Reader, calls: Calls) -> Reading[None]:
        yield from reader.skip_space()
        yield from reader.starts(["["])
        yield from _read_objects(reader, calls)
        yield from reader.starts(["]"])

    def read(reader: Reader, marker: str, calls: Calls) -> Reading[None]:
        if (yield from all_calls(reader, calls, end, objects(reader, calls))):
            space = yield from reader.skip_space()
            if not (yield from reader.starts([end])):
                reader.give_back(space)

    return read


def _read_named(reader: Reader, marker: str, calls: Calls) -> Reading[None]:
    """Reads a list of objects that have the function's name as their only key."""
    yield from all_calls(reader, calls, _APERTUS_END, _read_named_objects(reader, calls))


def _read_named_objects(reader: Reader, calls: Calls) -> Reading[None]:
    yield from reader.skip_space()
    yield from reader.starts(["["])
    while True:
        yield from reader.skip_space()
        if not (yield from reader.starts(["{"])):
            raise NotACall
        yield calls.begin((yield from read_key(reader)))
        yield from read_arguments(reader, calls)
        yield from drop_braces(reader)
        yield from reader.skip_space()
        if not (yield from reader.starts([","])):
            break
    yield from reader.starts(["]"])
    yield from reader.skip_space()
    yield from reader.starts([_APERTUS_END])


def _named_call(lark: Lark, function: Function) -> str:
    """`{"name": {...}}`."""
    head = f"{{{json.dumps(function.name, ensure_ascii=False)}: "
    return f"{lark.text(head)} {json_arguments(lark, function)} {lark.text('}')}"


def _cohere_call(lark: Lark, function: Function) -> str:
    """The call's number in its list, the name, and the arguments."""
    name = json.dumps(function.name, ensure_ascii=False)
    middle = lark.text(f'", "tool_name": {name}, "parameters": ')
    return f"/[0-9]{{1,3}}/ {middle} {json_arguments(lark, function)} {lark.text('}')}"


Header = Callable[[Reader, Calls], Reading[tuple[str, str | None]]]
"""Reads what stands before a call's arguments: the function's name and, if there is one, the id."""


def _section(header: Header, call_begin: str, call_end: str, end: str) -> ReadCalls:
    """Reads calls side by side, each between markers of its own, up to the `end` marker."""

    def read(reader: Reader, marker: str, calls: Calls) -> Reading[None]:
        yield from reader.skip_space()
        if marker != call_begin and not (yield from reader.starts([call_begin])):
            raise NotACall
        while True:
            name, id = yield from header(reader, calls)
            yield calls.begin(name, id)
            yield from read_arguments(reader, calls)
            yield from reader.collect([call_end])
            yield from reader.skip_space()
            if (yield from reader.starts([call_begin, end])) != call_begin:
                return

    return read


def _kimi_header(reader: Reader, calls: Calls) -> Reading[tuple[str, str | None]]:
    """`functions.name:0`, which is the id. Models also write `functions_name_0` and the like: that
    is the function of the request whose name it has in it.
    """
    id, _ = yield from reader.name(["<|tool_call_argument_begin|>"])
    name, _, index = id.rpartition(":")
    if name and index.isdigit():
        return name.removeprefix("functions."), id
    rest = id.removeprefix("functions")
    stem = _INDEX.sub("", rest)
    for name in (id, rest, rest.lstrip("._:"), stem, stem.lstrip("._:")):
        if calls.declares(name):
            return name, None
    raise NotACall


_INDEX = re.compile(r"[:._-]?\d+$")


def _kimi_call(lark: Lark, function: Function) -> str:
    """The name, which index it likes, and the arguments."""
    separator = lark.text("<|tool_call_argument_begin|>")
    arguments = json_arguments(lark, function)
    return f"{lark.text(function.name + ':')} /[0-9]{{1,3}}/ {separator} {arguments}"


def _deepseek_header(reader: Reader, calls: Calls) -> Reading[tuple[str, str | None]]:
    """`name`, and the separator; V3 and R1 say `function`, the separator, `name`, and a fence."""
    name, _ = yield from reader.name(["<｜tool▁sep｜>"])
    if name == "function" and (yield from reader.peek()) != "{":
        name, _ = yield from reader.name(["\n```json\n"])
    return name, None


_SOLAR_NAME, _SOLAR_ARGUMENTS = "<|tool_call:name|>", "<|tool_call:args|>"
_SOLAR_ID = re.compile(r"[\w.:/-]{0,256}")


def _solar_header(reader: Reader, calls: Calls) -> Reading[tuple[str, str | None]]:
    """The id, which may be missing, and the name."""
    id, _ = yield from reader.name([_SOLAR_NAME], _SOLAR_ID)
    name, _ = yield from reader.name([_SOLAR_ARGUMENTS])
    return name, id or None


def _solar_call(lark: Lark, function: Function) -> str:
    """An id, as the models make them up, the name, and the arguments."""
    head = lark.text(f"{_SOLAR_NAME}{function.name}{_SOLAR_ARGUMENTS}")
    return f"/[a-z0-9]{{10}}/ {head} {json_arguments(lark, function)}"


HERMES = ToolFormat(
    "hermes",
    ["<tool_call>"],
    enclosed_object("</tool_call>"),
    CallSyntax(json_call(), begin="<tool_call>\n", end="\n</tool_call>", between="\n"),
    ends=["</tool_call>"],
)
"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen 2.5 and 3, others."""

GENERIC = replace(HERMES, name="generic", found_by="text")
"""Hermes's, for models whose chat template has no tools: the server describes it in the prompt."""

LLAMA3 = ToolFormat(
    "llama3_json",
    ["<|python_tag|>"],
    _read_bare,
    CallSyntax(json_call(arguments_key="parameters"), between="; "),
    leading=["{"],
)
"""`{"name": ..., "parameters": {...}}` in place of an answer: Llama 3.1 to 3.3."""

MISTRAL = ToolFormat(
    "mistral",
    ["[TOOL_CALLS]"],
    _read_mistral,
    CallSyntax(json_call(), opens="[TOOL_CALLS][", between=", ", closes="]"),
    new_id=short_id,
)
"""`[TOOL_CALLS]` before a list: Mistral's models up to the tokenizer's version 7."""

MISTRAL_ARGS = replace(
    MISTRAL,
    name="mistral_args",
    syntax=CallSyntax(headed_call("[ARGS]"), begin="[TOOL_CALLS]"),
)
"""`[TOOL_CALLS]name[ARGS]{...}` for each call: Mistral's models since."""

KIMI_K2 = ToolFormat(
    "kimi_k2",
    ["<|tool_calls_section_begin|>", "<|tool_call_begin|>"],
    _section(
        _kimi_header, "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>"
    ),
    CallSyntax(
        _kimi_call,
        opens="<|tool_calls_section_begin|>",
        begin="<|tool_call_begin|>functions.",
        end="<|tool_call_end|>",
        closes="<|tool_calls_section_end|>",
    ),
    ends=["<|tool_calls_section_end|>", "<|tool_call_end|>"],
    new_id=indexed_id,
)

_DEEPSEEK_MARKERS = ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"]
_DEEPSEEK_ENDS = ["<｜tool▁calls▁end｜>", "<｜tool▁call▁end｜>"]
_read_deepseek = _section(
    _deepseek_header, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
)

DEEPSEEK_V3 = ToolFormat(
    "deepseek_v3",
    _DEEPSEEK_MARKERS,
    _read_deepseek,
    CallSyntax(
        headed_call("\n```json\n"),
        opens="<｜tool▁calls▁begin｜>",
        begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        end="\n```<｜tool▁call▁end｜>",
        between="\n",
        closes="<｜tool▁calls▁end｜>",
    ),
    ends=_DEEPSEEK_ENDS,
)
"""DeepSeek V3 and R1."""

DEEPSEEK_V31 = ToolFormat(
    "deepseek_v31",
    _DEEPSEEK_MARKERS,
    _read_deepseek,
    CallSyntax(
        headed_call("<｜tool▁sep｜>"),
        opens="<｜tool▁calls▁begin｜>",
        begin="<｜tool▁call▁begin｜>",
        end="<｜tool▁call▁end｜>",
        closes="<｜tool▁calls▁end｜>",
    ),
    ends=_DEEPSEEK_ENDS,
)

_APERTUS_END = "<|tools_suffix|>"

SOLAR_OPEN = ToolFormat(
    "solar_open",
    ["<|tool_calls|>", "<|tool_call:begin|>"],
    _section(_solar_header, "<|tool_call:begin|>", "<|tool_call:end|>", "<|calls|>"),
    CallSyntax(
        _solar_call,
        opens="<|tool_calls|>",
        begin="<|tool_call:begin|>",
        end="<|tool_call:end|>",
        closes="<|calls|>",
    ),
    ends=["<|calls|>", "<|tool_call:end|>"],
    new_id=lower_id,
)
"""`<|tool_call:begin|>id<|tool_call:name|>name<|tool_call:args|>{...}<|tool_call:end|>` for each
call, after `<|tool_calls|>`: Upstage's Solar Open. The marker after the last call ends the answer.
"""

_PLAMO_NAME, _PLAMO_NAME_END = "<|plamo:begin_tool_name:plamo|>", "<|plamo:end_tool_name:plamo|>"
_PLAMO_ARGUMENTS = "<|plamo:begin_tool_arguments:plamo|>"
_PLAMO_MESSAGE = "<|plamo:msg|>"
_PLAMO_CALL, _PLAMO_CALL_END = (
    "<|plamo:begin_tool_request:plamo|>",
    "<|plamo:end_tool_request:plamo|>",
)
_PLAMO_CALLS, _PLAMO_CALLS_END = (
    "<|plamo:begin_tool_requests:plamo|>",
    "<|plamo:end_tool_requests:plamo|>",
)


def _plamo_header(reader: Reader, calls: Calls) -> Reading[tuple[str, str | None]]:
    """The name between its markers, and what stands before the arguments."""
    yield from reader.skip_space()
    if not (yield from reader.starts([_PLAMO_NAME])):
        raise NotACall
    name, _ = yield from reader.name([_PLAMO_NAME_END])
    yield from reader.collect([_PLAMO_MESSAGE, _PLAMO_CALL_END])
    return name, None


PLAMO3 = ToolFormat(
    "plamo3",
    [_PLAMO_CALLS],
    _section(_plamo_header, _PLAMO_CALL, _PLAMO_CALL_END, _PLAMO_CALLS_END),
    CallSyntax(
        headed_call(f"{_PLAMO_NAME_END}{_PLAMO_ARGUMENTS}<|plamo:constrain|>json{_PLAMO_MESSAGE}"),
        opens=_PLAMO_CALLS,
        begin=f"{_PLAMO_CALL}{_PLAMO_NAME}",
        end=f"<|plamo:end_tool_arguments:plamo|>{_PLAMO_CALL_END}",
        closes=_PLAMO_CALLS_END,
    ),
    ends=[_PLAMO_CALLS_END],
)
"""`<|plamo:begin_tool_name:plamo|>name<|plamo:end_tool_name:plamo|>` and, after `<|plamo:msg|>`,
the arguments, all in a section: PLaMo 3.
"""

HUNYUAN_A13B = ToolFormat(
    "hunyuan_a13b",
    ["<tool_calls>"],
    _listed("</tool_calls>"),
    CallSyntax(json_call(), opens="<tool_calls>[", between=", ", closes="]</tool_calls>"),
    ends=["</tool_calls>"],
)
"""`<tool_calls>[{"name": ..., "arguments": {...}}]</tool_calls>`: Tencent's Hunyuan, and Apriel of
ServiceNow.
"""

MINIMAX = replace(
    HUNYUAN_A13B,
    name="minimax",
    syntax=CallSyntax(json_call(), opens="<tool_calls>\n", end="\n", closes="</tool_calls>"),
)
"""An object on each line between these tags: MiniMax M1."""

NEMOTRON_JSON = ToolFormat(
    "nemotron_json",
    ["<TOOLCALL>"],
    _listed("</TOOLCALL>"),
    CallSyntax(json_call(), opens="<TOOLCALL>[", between=", ", closes="]</TOOLCALL>"),
    ends=["</TOOLCALL>"],
)
"""`<TOOLCALL>[{"name": ..., "arguments": {...}}]</TOOLCALL>`: Nemotron up to version 2."""

GRANITE = ToolFormat(
    "granite",
    ["<|tool_call|>"],
    _listed("<|/tool_call|>"),
    CallSyntax(json_call(), opens="<|tool_call|>[", between=", ", closes="]"),
    ends=["<|/tool_call|>"],
)
"""`<|tool_call|>` before a list: IBM's Granite up to 3.3. Phi 4 mini ends the list by
`<|/tool_call|>`.
"""

PHI4_MINI_JSON = ToolFormat(
    "phi4_mini_json",
    ["functools["],
    _listed("</functools>"),
    CallSyntax(json_call(), opens="functools[", between=", ", closes="]"),
    ends=["]"],
)
"""`functools[{"name": ..., "arguments": {...}}]`: Phi 4 mini, FireFunction."""

COHERE_COMMAND3 = ToolFormat(
    "cohere_command3",
    ["<|START_ACTION|>"],
    _listed("<|END_ACTION|>"),
    CallSyntax(
        _cohere_call,
        opens="<|START_ACTION|>[\n",
        begin='    {"tool_call_id": "',
        between=",\n",
        closes="\n]<|END_ACTION|>",
    ),
    ends=["<|END_ACTION|>"],
)
"""`<|START_ACTION|>[{"tool_call_id": "0", "tool_name": ..., "parameters": {...}}]<|END_ACTION|>`:
Cohere's Command R7B and A.
"""

GIGACHAT3 = ToolFormat(
    "gigachat3",
    [
        "<|function_call|>",
        "<|message_sep|>\n\nfunction call<|role_sep|>",
        "function call<|role_sep|>",
    ],
    _read_bare,
    CallSyntax(json_call(), begin="<|function_call|>"),
)
"""`<|function_call|>{"name": ..., "arguments": {...}}`: GigaChat 3."""

APERTUS = ToolFormat(
    "apertus",
    ["<|tools_prefix|>"],
    _read_named,
    CallSyntax(_named_call, opens="<|tools_prefix|>[", between=", ", closes=f"]{_APERTUS_END}"),
    ends=[_APERTUS_END],
)
"""`<|tools_prefix|>[{"name": {...}}]<|tools_suffix|>`: Apertus."""
