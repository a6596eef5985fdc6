"""Arguments that are nearly JSON are read where they have one reading, in whatever pieces."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.parsing.registry import Formats, answer_format
from tests.property.test_parsing import CUTS, SOME, TEXT, VALUES
from tests.unit.parsing.answers import Answer, parsed, pieces

OBJECTS = st.dictionaries(TEXT, VALUES, min_size=1, max_size=3)


def answer(written: str, cuts: list[int], name: str = "hermes") -> Answer:
    call = {
        "hermes": f'<tool_call>\n{{"name": "f", "arguments": {written}}}\n</tool_call>',
        "mistral_args": f"[TOOL_CALLS]f[ARGS]{written}",
        "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
        f"<|tool_call_argument_begin|>{written}<|tool_call_end|><|tool_calls_section_end|>",
        "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>"
        f"{written}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    }[name]
    return parsed(answer_format(Formats(name, None)), pieces(call, cuts))


FORMATS = st.sampled_from(["hermes", "mistral_args", "kimi_k2", "deepseek_v31"])


def check(written: str, value: Any, cuts: list[int], name: str) -> None:
    found = answer(written, cuts, name)
    assert found.calls == [("f", value)]
    assert found.content == ""


@SOME
@given(OBJECTS, CUTS, FORMATS)
def test_line_breaks_and_tabs_in_strings_are_escaped(
    value: Any, cuts: list[int], name: str
) -> None:
    value = {**value, "code": "if x:\n\ty = '\x01'\r\n"}
    written = json.dumps(value, ensure_ascii=False)
    for raw, escape in (("\n", r"\n"), ("\t", r"\t"), ("\r", r"\r"), ("\x01", r"\u0001")):
        written = "\\\\".join(part.replace(escape, raw) for part in written.split("\\\\"))
    check(written, value, cuts, name)


@SOME
@given(OBJECTS, CUTS, FORMATS)
def test_escapes_that_json_does_not_have_are_the_text_that_they_are(
    value: Any, cuts: list[int], name: str
) -> None:
    value = {**value, "pattern": r"\d+ \(x\) \u12"}
    written = json.dumps(value, ensure_ascii=False).replace(r"\\d", r"\d")
    check(written.replace(r"\\(", r"\(").replace(r"\\u1", r"\u1"), value, cuts, name)


@SOME
@given(OBJECTS, CUTS, FORMATS, st.integers(1, 3))
def test_a_brace_too_many_is_dropped(value: Any, cuts: list[int], name: str, n: int) -> None:
    check(json.dumps(value) + "}" * n, value, cuts, name)


@SOME
@given(OBJECTS, CUTS, st.sampled_from(["hermes", "kimi_k2", "deepseek_v31"]), st.integers(0, 2))
def test_brackets_that_are_missing_before_the_end_of_the_call_are_added(
    value: Any, cuts: list[int], name: str, n: int
) -> None:
    written = json.dumps({"list": [value, {"deep": [1, value]}]})
    if name == "hermes":
        cut = f'<tool_call>{{"name": "f", "arguments": {written[: len(written) - n]}</tool_call>'
        found = parsed(answer_format(Formats(name, None)), pieces(cut, cuts))
        assert found.calls == [("f", json.loads(written))]
        assert found.content == ""
    else:
        check(written[: len(written) - n], json.loads(written), cuts, name)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ('{"a": [1, 2}', {"a": [1, 2]}),
        ('{"a": 1,}', {"a": 1}),
        ('{"a": [1, ], "b": 2, }', {"a": [1], "b": 2}),
        ('{"a": 1]}', {"a": 1}),
        (r'{"a": "it\'s"}', {"a": "it's"}),
        (r'"{\"a\": \"b\nc\"}"', {"a": "b\nc"}),
    ],
)
@pytest.mark.parametrize("cuts", [[], list(range(200))], ids=["whole", "in characters"])
def test_brackets_commas_and_quotes(written: str, value: Any, cuts: list[int]) -> None:
    check(written, value, cuts, "hermes")


@pytest.mark.parametrize("written", ['{"a": ', '{"a"', '{"a": "x'])
def test_what_has_no_one_reading_is_left_open(written: str) -> None:
    """Arguments that may lack their half must not look complete."""
    text = f'<tool_call>{{"name": "f", "arguments": {written}</tool_call>'
    [arguments] = parsed(answer_format(Formats("hermes", None)), [text]).arguments
    with pytest.raises(ValueError, match=r"Expecting|Unterminated"):
        json.loads(arguments)
