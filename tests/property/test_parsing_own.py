"""Families with a syntax of their own: in whatever pieces an answer comes, its calls have the
values that were written, as mlx-lm's parsers of whole texts read them, and no markup is shown.

mlx-lm is asked where it can tell. It cannot where
- an argument of functiongemma is an object or a list: it ends at the first brace or comma;
- gemma4's text has what looks like a key, as in `<|"|>{a:<|"|>`, or its key is no word.
"""

import json
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from keyword import iskeyword
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tool_parsers import function_gemma, gemma4, pythonic

from server.parsing.answer import MarkedFormat, ReasoningFormat, ToolFormat
from server.parsing.formats import harmony
from server.parsing.formats.literal_calls import FUNCTION_GEMMA, GEMMA4, LFM2, PYTHONIC
from server.parsing.registry import AnswerFormat
from tests.profiles import examples
from tests.unit.parsing.answers import parsed, pieces

Call = tuple[str, dict[str, Any]]

NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,12}", fullmatch=True).filter(
    lambda name: not iskeyword(name)  # which mlx-lm's parser of Python's syntax cannot read
)
TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12) | st.sampled_from(
    ['"', "'", "\\", "\\n", "}", ")]", "<", "<tool_call|>", "<|call|>", "<|", "é\n", "a, b=1"]
)
TEXT = TEXT.filter(lambda text: '<|"|>' not in text and "<escape>" not in text)
SCALARS = st.none() | st.booleans() | st.integers(-1000, 1000) | st.floats(-10, 10) | TEXT
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)


def calls_of(values: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Call]]:
    arguments = st.dictionaries(NAMES, values, max_size=3)
    return st.lists(st.tuples(NAMES, arguments), min_size=1, max_size=3)


CUTS = st.lists(st.integers(0, 4000), max_size=20)
CONTENT = st.sampled_from(["", "Let me look.", "I < you, {and} [more]", "two\n\nlines"])
SPACE = st.builds(operator.mul, st.sampled_from(["\n", " \t"]), st.integers(1, 700))
REASONING = st.sampled_from(["", "Hm, {or}?", "step\n\nby step"])
THINK = ReasoningFormat("<think>", "</think>")


@dataclass(frozen=True)
class Family:
    """How its models write calls, and what mlx-lm makes of them."""

    tools: ToolFormat
    format: AnswerFormat
    calls: st.SearchStrategy[list[Call]]
    write: Callable[[Sequence[Call]], str]
    meaning: Callable[[str], list[Call]] | None = None


def gemma_value(quote: str, value: Any) -> str:
    match value:
        case str():
            return f"{quote}{value}{quote}"
        case list():
            return f"[{','.join(gemma_value(quote, item) for item in value)}]"
        case dict():
            items = (f"{quote}{key}{quote}:{gemma_value(quote, of)}" for key, of in value.items())
            return f"{{{','.join(items)}}}"
        case _:
            return json.dumps(value)


def gemma(begin: str, end: str, quote: str) -> Callable[[Sequence[Call]], str]:
    def write(calls: Sequence[Call]) -> str:
        return "".join(
            f"{begin}call:{name}{{"
            + ",".join(f"{key}:{gemma_value(quote, value)}" for key, value in arguments.items())
            + f"}}{end}"
            for name, arguments in calls
        )

    return write


def python(calls: Sequence[Call]) -> str:
    written = (
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        for name, arguments in calls
    )
    return f"[{', '.join(written)}]"


def lfm2(calls: Sequence[Call]) -> str:
    return f"<|tool_call_start|>{python(calls)}<|tool_call_end|>"


def gpt_oss(calls: Sequence[Call]) -> str:
    return "".join(
        f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        f"{json.dumps(arguments, ensure_ascii=False)}<|call|>"
        for name, arguments in calls
    )


def gemma4_meaning(text: str) -> list[Call]:
    return _calls(gemma4.parse_tool_call(text))


def function_gemma_meaning(text: str) -> list[Call]:
    blocks = text.split("<start_function_call>")[1:]
    return [_calls(function_gemma.parse_tool_call(block))[0] for block in blocks]


def python_meaning(text: str) -> list[Call]:
    return _calls(pythonic.parse_tool_call(text))


def _calls(found: Any) -> list[Call]:
    return [
        (call["name"], call["arguments"])
        for call in (found if isinstance(found, list) else [found])
    ]


PLAIN = st.text(st.sampled_from("ab .é'\\"), max_size=8)
FAMILIES = {
    "gemma4": Family(
        GEMMA4,
        MarkedFormat(THINK, GEMMA4),
        calls_of(VALUES),
        gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    ),
    "gemma4-plain": Family(
        GEMMA4,
        MarkedFormat(THINK, GEMMA4),
        calls_of(st.lists(st.integers() | PLAIN, max_size=3) | st.integers() | PLAIN),
        gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
        gemma4_meaning,
    ),
    "functiongemma": Family(
        FUNCTION_GEMMA,
        MarkedFormat(THINK, FUNCTION_GEMMA),
        calls_of(VALUES),
        gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    ),
    "functiongemma-plain": Family(
        FUNCTION_GEMMA,
        MarkedFormat(THINK, FUNCTION_GEMMA),
        calls_of(st.integers() | st.booleans() | st.none() | PLAIN),
        gemma("<start_function_call>", "<end_function_call>", "<escape>"),
        function_gemma_meaning,
    ),
    "lfm2": Family(LFM2, MarkedFormat(THINK, LFM2), calls_of(VALUES), lfm2, python_meaning),
    "pythonic": Family(
        PYTHONIC, MarkedFormat(THINK, PYTHONIC), calls_of(VALUES), python, python_meaning
    ),
    "openai": Family(harmony.TOOLS, harmony.Harmony(harmony.TOOLS), calls_of(VALUES), gpt_oss),
}
SOME = settings(max_examples=examples(30), deadline=None)
BY_NAME = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


def answered(family: Family, reasoning: str, content: str, written: str) -> str:
    if family.tools is harmony.TOOLS:
        thought = f"<|channel|>analysis<|message|>{reasoning}<|end|><|start|>assistant"
        said = f"<|channel|>commentary<|message|>{content}<|end|>"
        return f"{thought if reasoning else ''}{said if content else ''}{written}"
    return f"<think>\n{reasoning}\n</think>\n\n{content}{written}"


@BY_NAME
@SOME
@given(data=st.data(), content=CONTENT, reasoning=REASONING, space=SPACE, cuts=CUTS)
def test_an_answer_in_pieces_means_what_the_whole_means(
    family: Family,
    data: st.DataObject,
    content: str,
    reasoning: str,
    space: str,
    cuts: list[int],
) -> None:
    calls = data.draw(family.calls)
    if family.tools is PYTHONIC:
        content = ""  # there a call stands in place of an answer
    written = family.write(calls)
    text = answered(family, reasoning, content, space + written)
    tools: dict[str, dict[str, Any]] = {name: {} for name, _ in calls}
    answer = parsed(family.format, pieces(text, cuts), tools)
    assert answer.calls == calls
    assert answer.content == content
    assert answer.reasoning == reasoning
    if family.meaning:
        assert answer.calls == family.meaning(written)


@BY_NAME
@SOME
@given(data=st.data(), cuts=CUTS, end=st.integers(0, 2000))
def test_an_answer_that_is_cut_off_has_the_calls_whose_names_came(
    family: Family, data: st.DataObject, cuts: list[int], end: int
) -> None:
    calls = data.draw(family.calls)
    tools: dict[str, dict[str, Any]] = {name: {} for name, _ in calls}
    written = family.write(calls)
    text = written[: end % (len(written) + 1)]
    answer = parsed(family.format, pieces(text, cuts), tools)
    assert answer == parsed(family.format, [text], tools)
    assert answer.names == [name for name, _ in calls][: len(answer.names)]


@BY_NAME
@SOME
@given(text=st.text(st.sampled_from("ab {}[]()<>'\"\\:=,|\n"), max_size=60), cuts=CUTS)
def test_whatever_is_no_call_is_content_as_it_stands(
    family: Family, text: str, cuts: list[int]
) -> None:
    text = f"So{text}"
    assert parsed(family.format, pieces(text, cuts)).content == text


@BY_NAME
@SOME
@given(
    behind=st.sampled_from(["", "call:f{", "[f(", "f<|message|>{", '[f(a="', 'call:f{a:<|"|>']),
    junk=st.text(st.sampled_from("ab {}[]()<>'\"\\:=,|\n"), max_size=40),
    cuts=CUTS,
)
def test_a_marker_before_anything_reads_alike_in_pieces(
    family: Family, behind: str, junk: str, cuts: list[int]
) -> None:
    text = f"{family.tools.begins[0]}{behind}{junk}"
    answer = parsed(family.format, pieces(text, cuts))
    assert answer == parsed(family.format, [text])
    if family.tools is not harmony.TOOLS:
        assert answer.names or answer.content == text
