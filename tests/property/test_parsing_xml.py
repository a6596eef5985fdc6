"""Families with typed parameters: in whatever pieces an answer comes, its calls have the values
that were written, as mlx-lm's parsers of whole texts read them, and no markup is shown.

mlx-lm is asked where it keeps to the schema. It does not where
- a string says `null` (qwen3_coder, minimax_m2, minicpm5), or any JSON (muse_spark): it becomes
  that;
- a string may be null, and says JSON or a Python literal (glm47, longcat, qwen3_coder);
- a string contains the end tag of the whole call (minimax_m2, minicpm5): it ends there, in minicpm5
  even inside of the CDATA section that is there for such text;
- a call has no parameters (longcat): it raises AttributeError;
- an integer is larger than what a float holds (qwen3_coder): it is rounded.
"""

import ast
import json
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tool_parsers import (
    glm47,
    kimi_k3,
    laguna,
    longcat,
    minicpm5,
    minimax_m2,
    muse_spark,
    qwen3_coder,
)

from server.parsing.answer import MarkedFormat, ReasoningFormat, ToolFormat
from server.parsing.formats import xml_calls
from tests.profiles import examples
from tests.unit.parsing.answers import parsed, pieces

Schema = dict[str, Any]
Call = tuple[str, dict[str, tuple[Schema, Any]]]
"""A function's name, and for each argument its schema and its value."""

NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,12}", fullmatch=True)
MARKUP = ["</tool_call>", "</function>", "</invoke>", "<parameter=", "<arg_value>", "<|close|>"]
ODD = [
    "",
    '"',
    "\\",
    "}",
    "\n",
    " a ",
    "<",
    "</",
    "null",
    "nu",
    "12",
    "[1]",
    "<p>\n</p>\n",
    "é\n",
    "]]",
]
JUNK = [
    "<",
    ">",
    "</",
    "=",
    '"',
    "name",
    "key",
    "{",
    "\n",
    "<b>",
    "<parameter=",
    "<parameter ",
    "<param ",
]
JUNK += ["<arg_key>", "</arg_key>", "</parameter>", "<|open|>argument", "<|sep|>", "<![CDATA["]
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ODD + MARKUP
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-1000, 1000) | st.floats(-10, 10) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=4,
)
ARGUMENTS = st.one_of(
    st.tuples(st.just({"type": "string"}), TEXT),
    st.tuples(st.just({"anyOf": [{"type": "string"}, {"type": "null"}]}), TEXT | st.none()),
    st.tuples(st.just({"type": "integer"}), st.integers(-(2**53), 2**53)),
    st.tuples(st.just({"type": "number"}), st.floats(allow_nan=False, allow_infinity=False)),
    st.tuples(st.just({"type": "boolean"}), st.booleans()),
    st.tuples(st.just({"type": "object"}), st.dictionaries(TEXT, JSON, max_size=3)),
    st.tuples(st.just({"type": "array"}), st.lists(JSON, max_size=3)),
)
CALLS = st.lists(
    st.tuples(NAMES, st.dictionaries(NAMES, ARGUMENTS, max_size=3)),
    min_size=1,
    max_size=3,
    unique_by=lambda call: call[0],
)
CUTS = st.lists(st.integers(0, 4000), max_size=20)
CONTENT = st.sampled_from(["", "Let me look.", "I < you, {and} [more]", "<tool", "two\n\nlines"])
SPACE = st.builds(operator.mul, st.sampled_from(["\n", " \t"]), st.integers(1, 700))
REASONING = st.sampled_from(["", "Hm, <tool_call> or {?", "step\n\nby step"])


def dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def plain(value: object) -> str:
    return value if isinstance(value, str) else dumps(value)


def exact(text: str) -> str:
    return text


def in_cdata(value: object) -> str:
    is_odd = isinstance(value, str) and (set("<&\n") & set(value) or value != value.strip())
    return f"<![CDATA[{value}]]>" if is_odd else plain(value)


@dataclass(frozen=True)
class Family:
    """How its models write a call's name and arguments, how calls stand together, what is
    left of a string, and what mlx-lm makes of one call.
    """

    format: ToolFormat
    head: str
    argument: Callable[[str, Any], str]
    tail: str
    begins: str = ""
    between: str = ""
    ends: str = ""
    trimmed: Callable[[str], str] = str.strip
    meaning: Callable[[str, Any], Any] | None = None

    def write(self, calls: Sequence[Call]) -> str:
        return self.begins + self.between.join(map(self.write_one, calls)) + self.ends

    def write_one(self, call: Call) -> str:
        name, arguments = call
        written = (self.argument(key, value) for key, (_, value) in arguments.items())
        return self.head.format(name=name) + "".join(written) + self.tail


def _qwen(key: str, value: Any) -> str:
    return f"<parameter={key}>\n{plain(value)}\n</parameter>\n"


def _glm(prefix: str, line: str) -> Callable[[str, Any], str]:
    def argument(key: str, value: Any) -> str:
        head = f"<{prefix}arg_key>{key}</{prefix}arg_key>{line}"
        return f"{head}<{prefix}arg_value>{plain(value)}</{prefix}arg_value>{line}"

    return argument


def _glm_meaning(parser: Any, prefix: str) -> Callable[[str, Any], Any]:
    def meaning(text: str, tools: Any) -> Any:
        inside = text.removeprefix(f"<{prefix}tool_call>").removesuffix(f"</{prefix}tool_call>")
        return parser.parse_tool_call(inside, tools)

    return meaning


def _dsml(key: str, value: Any) -> str:
    is_string = str(isinstance(value, str)).lower()
    head = f'<｜DSML｜parameter name="{key}" string="{is_string}">'
    return f"{head}{plain(value)}</｜DSML｜parameter>\n"


_KIMI_TYPES = {str: "string", bool: "boolean", type(None): "null", dict: "object", list: "array"}


def _kimi(key: str, value: Any) -> str:
    head = f'<|open|>argument key="{key}" type="{_KIMI_TYPES.get(type(value), "number")}"<|sep|>'
    return f"{head}{plain(value)}<|close|>argument<|sep|>"


FAMILIES = [
    Family(
        xml_calls.QWEN3_CODER,
        "<tool_call>\n<function={name}>\n",
        _qwen,
        "</function>\n</tool_call>",
        between="\n",
        trimmed=exact,
        meaning=lambda text, tools: qwen3_coder.parse_tool_call(
            text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"), tools
        ),
    ),
    *(
        Family(
            format,
            f"<{prefix}tool_call>{{name}}{line}",
            _glm(prefix, line),
            f"</{prefix}tool_call>",
            between="\n",
            meaning=_glm_meaning(parser, prefix),
        )
        for format, parser, prefix, line in (
            (xml_calls.GLM47, glm47, "", ""),
            (xml_calls.GLM45, glm47, "", "\n"),
            (xml_calls.LAGUNA, laguna, "", ""),
            (xml_calls.LONGCAT, longcat, "longcat_", "\n"),
        )
    ),
    Family(
        xml_calls.MINIMAX_M2,
        '<invoke name="{name}">\n',
        lambda key, value: f'<parameter name="{key}">{plain(value)}</parameter>\n',
        "</invoke>\n",
        begins="<minimax:tool_call>\n",
        ends="</minimax:tool_call>",
        meaning=minimax_m2.parse_tool_call,
    ),
    Family(
        xml_calls.MUSE_SPARK,
        '<atem:invoke name="{name}">\n',
        lambda key, value: f'<atem:parameter name="{key}">{plain(value)}</atem:parameter>\n',
        "</atem:invoke>\n",
        begins="<atem:function_calls>\n",
        ends="</atem:function_calls>",
        meaning=muse_spark.parse_tool_call,
    ),
    Family(
        xml_calls.MINICPM5,
        '<function name="{name}">',
        lambda key, value: f'<param name="{key}">{in_cdata(value)}</param>',
        "</function>",
        between="\n",
        trimmed=exact,
        meaning=minicpm5.parse_tool_call,
    ),
    Family(
        xml_calls.DEEPSEEK_V32,
        '<｜DSML｜invoke name="{name}">\n',
        _dsml,
        "</｜DSML｜invoke>\n",
        begins="<｜DSML｜function_calls>\n",
        ends="</｜DSML｜function_calls>",
        trimmed=exact,
    ),
    Family(
        xml_calls.KIMI_K3,
        '<|open|>call tool="{name}" index="1"<|sep|>',
        _kimi,
        "<|close|>call<|sep|>",
        begins="<|open|>tools<|sep|>",
        ends="<|close|>tools<|sep|>",
        trimmed=exact,
        meaning=lambda text, tools: kimi_k3.parse_tool_call(text, tools)[0],
    ),
]
BY_NAME = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.format.name)
SOME = settings(deadline=None, max_examples=examples(40))
THINK = ReasoningFormat("<think>", "</think>")


@BY_NAME
@SOME
@given(calls=CALLS, content=CONTENT, reasoning=REASONING, space=SPACE, cuts=CUTS)
def test_an_answer_in_pieces_has_the_values_that_were_written(
    family: Family,
    calls: list[Call],
    content: str,
    reasoning: str,
    space: str,
    cuts: list[int],
) -> None:
    thought = f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""
    text = f"{thought}{content}{space}{family.write(calls)}{space}"
    format = MarkedFormat(THINK, family.format)
    answer = parsed(format, pieces(text, cuts), _schemas(calls))
    assert answer.content == content
    assert answer.reasoning == reasoning
    assert answer.calls == [(name, _values(family, arguments)) for name, arguments in calls]


@BY_NAME
@SOME
@given(calls=CALLS, cuts=CUTS)
def test_mlx_lm_reads_the_same(family: Family, calls: list[Call], cuts: list[int]) -> None:
    calls = [call for call in calls if _is_plain(call)]
    format = MarkedFormat(None, family.format)
    answer = parsed(format, pieces(family.write(calls), cuts), _schemas(calls))
    if family.meaning:
        tools = [
            {"type": "function", "function": {"name": name, "parameters": schema}}
            for name, schema in _schemas(calls).items()
        ]
        meant = [family.meaning(family.write_one(call), tools) for call in calls]
        assert answer.calls == [(call["name"], call["arguments"]) for call in meant]


@BY_NAME
@SOME
@given(calls=CALLS, cuts=CUTS, end=st.integers(0, 2000))
def test_an_answer_that_is_cut_off_has_the_begin_of_what_the_whole_has(
    family: Family, calls: list[Call], cuts: list[int], end: int
) -> None:
    written = family.write(calls)
    text = written[: end % (len(written) + 1)]
    format = MarkedFormat(None, family.format)
    answer = parsed(format, pieces(text, cuts), _schemas(calls))
    whole = parsed(format, [written], _schemas(calls))
    assert answer == parsed(format, [text], _schemas(calls))
    assert answer.names == whole.names[: len(answer.names)]
    assert text.endswith(answer.content)
    for arguments, all_arguments in zip(answer.arguments, whole.arguments, strict=False):
        assert all_arguments.startswith(arguments)


@BY_NAME
@SOME
@given(text=st.text(st.sampled_from('ab {}[]<>"\\:,|\n'), max_size=60), cuts=CUTS)
def test_whatever_is_no_call_is_content_as_it_stands(
    family: Family, text: str, cuts: list[int]
) -> None:
    assert parsed(MarkedFormat(None, family.format), pieces(text, cuts)).content == text


@BY_NAME
@SOME
@given(name=NAMES, junk=st.lists(st.sampled_from(JUNK), max_size=12), cuts=CUTS)
def test_a_call_that_breaks_off_shows_none_of_its_markup(
    family: Family, name: str, junk: list[str], cuts: list[int]
) -> None:
    call = family.head.format(name=name) + family.argument("key", "text")
    text = family.begins + call + "".join(junk)
    answer = parsed(MarkedFormat(None, family.format), pieces(text, cuts))
    assert answer == parsed(MarkedFormat(None, family.format), [text])
    assert answer.names == [name]
    assert answer.arguments[0].startswith('{"key": "text"')
    assert not answer.content


def _schemas(calls: Sequence[Call]) -> dict[str, Mapping[str, Any]]:
    return {
        name: {"type": "object", "properties": {key: arg[0] for key, arg in arguments.items()}}
        for name, arguments in calls
    }


def _values(family: Family, arguments: Mapping[str, tuple[Schema, Any]]) -> dict[str, Any]:
    return {key: _read(family, schema, value) for key, (schema, value) in arguments.items()}


def _read(family: Family, schema: Schema, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    text = family.trimmed(value)
    # The tags of these say that it is a string.
    is_said = family.format in (xml_calls.KIMI_K3, xml_calls.DEEPSEEK_V32)
    return None if text == "null" and "anyOf" in schema and not is_said else text


def _is_plain(call: Call) -> bool:
    """Whether mlx-lm keeps to the schema, see above."""
    values = [value for _, value in call[1].values()]
    has_tags = any("<" in dumps(value) for value in values)
    strings = [value.strip() for value in values if isinstance(value, str)]
    return bool(values) and not has_tags and not any(map(_is_literal, strings))


def _is_literal(text: str) -> bool:
    if text.lower() in ("null", "none", "nil"):
        return True
    for read in (json.loads, ast.literal_eval):
        try:
            read(text)
            return True
        except (ValueError, SyntaxError):
            pass
    return False
