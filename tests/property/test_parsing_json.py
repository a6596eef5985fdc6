"""Families with JSON arguments: in whatever pieces an answer comes, it means what mlx-lm's parsers
of whole texts make of it, and no markup is shown."""

import json
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tool_parsers import json_tools, kimi_k2, mistral

from server.parsing.answer import MarkedFormat, ReasoningFormat, ToolFormat
from server.parsing.formats import json_calls
from tests.unit.parsing.answers import parsed, pieces

Call = tuple[str, dict[str, Any]]

NAMES = st.from_regex(r"[a-z][a-z0-9_-]{0,12}", fullmatch=True)
TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12) | st.sampled_from(
    ['"', "\\", "}", "]", "<", "</tool_call>", "[ARGS]", "[TOOL_CALLS]", "```", "é\n", "<think>"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-1000, 1000) | st.floats(-10, 10) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
CALLS = st.lists(
    st.tuples(NAMES, st.dictionaries(TEXT, VALUES, max_size=3)), min_size=1, max_size=3
)
CUTS = st.lists(st.integers(0, 4000), max_size=20)
CONTENT = st.sampled_from(["", "Let me look.", "I < you, {and} [more]", "<tool", "two\n\nlines"])
SPACE = st.builds(operator.mul, st.sampled_from(["\n", " \t"]), st.integers(1, 700))
REASONING = st.sampled_from(["", "Hm, <tool_call> or {?", "step\n\nby step"])


def dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True)
class Family:
    """How its models write calls, and what mlx-lm makes of what stands between the markers."""

    format: ToolFormat
    write: Callable[[Sequence[Call]], str]
    meaning: Callable[[str], list[Call]] | None = None


def hermes(calls: Sequence[Call]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {dumps(arguments)}}}\n</tool_call>'
        for name, arguments in calls
    )


def hermes_meaning(text: str) -> list[Call]:
    blocks = [block.rpartition("\n</tool_call>")[0] for block in text.split("<tool_call>\n{")[1:]]
    return [_call(json_tools.parse_tool_call("{" + block)) for block in blocks]


def llama3(calls: Sequence[Call]) -> str:
    return "; ".join(
        f'{{"name": "{name}", "parameters": {dumps(arguments)}}}' for name, arguments in calls
    )


def mistral_list(calls: Sequence[Call]) -> str:
    objects = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return f"[TOOL_CALLS]{dumps(objects)}"


def mistral_args(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{dumps(arguments)}" for name, arguments in calls)


def mistral_meaning(text: str) -> list[Call]:
    found = mistral.parse_tool_call(text.removeprefix("[TOOL_CALLS]"))
    return [_call(call) for call in (found if isinstance(found, list) else [found])]


def kimi(calls: Sequence[Call]) -> str:
    blocks = "".join(
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>"
        f"{dumps(arguments)}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{blocks}<|tool_calls_section_end|>"


def kimi_meaning(text: str) -> list[Call]:
    return [_call(call) for call in kimi_k2.parse_tool_call(text)]


def deepseek_v3(calls: Sequence[Call]) -> str:
    blocks = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{dumps(arguments)}\n```"
        "<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{blocks}<｜tool▁calls▁end｜>"


def deepseek_v31(calls: Sequence[Call]) -> str:
    blocks = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{dumps(arguments)}<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{blocks}<｜tool▁calls▁end｜>"


def _call(call: dict[str, Any]) -> Call:
    return call["name"], call["arguments"]


FAMILIES = [
    Family(json_calls.HERMES, hermes, hermes_meaning),
    Family(json_calls.LLAMA3, llama3),
    Family(json_calls.MISTRAL, mistral_list, mistral_meaning),
    Family(json_calls.MISTRAL_ARGS, mistral_args),
    Family(json_calls.KIMI_K2, kimi, kimi_meaning),
    Family(json_calls.DEEPSEEK_V3, deepseek_v3),
    Family(json_calls.DEEPSEEK_V31, deepseek_v31),
]
BY_NAME = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.format.name)
THINK = ReasoningFormat("<think>", "</think>")


@BY_NAME
@given(calls=CALLS, content=CONTENT, reasoning=REASONING, space=SPACE, cuts=CUTS)
def test_an_answer_in_pieces_means_what_the_whole_means(
    family: Family,
    calls: list[Call],
    content: str,
    reasoning: str,
    space: str,
    cuts: list[int],
) -> None:
    if family.format is json_calls.LLAMA3:
        content = ""  # there a call stands in place of an answer
    written = family.write(calls)
    thought = f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""
    text = f"{thought}{content}{space}{written}"
    answer = parsed(MarkedFormat(THINK, family.format), pieces(text, cuts))
    assert answer.calls == calls
    assert answer.content == content
    assert answer.reasoning == reasoning
    if family.meaning and _is_plain(written):
        assert answer.calls == family.meaning(written)


@BY_NAME
@given(calls=CALLS, cuts=CUTS, end=st.integers(0, 2000))
def test_an_answer_that_is_cut_off_has_the_calls_whose_names_came(
    family: Family, calls: list[Call], cuts: list[int], end: int
) -> None:
    written = family.write(calls)
    text = written[: end % (len(written) + 1)]
    answer = parsed(MarkedFormat(THINK, family.format), pieces(text, cuts))
    whole = parsed(MarkedFormat(THINK, family.format), [text])
    assert answer == whole
    assert answer.names == [name for name, _ in calls][: len(answer.names)]


@BY_NAME
@given(text=st.text(st.sampled_from('ab {}[]<>"\\:,|\n'), max_size=60), cuts=CUTS)
def test_whatever_is_no_call_is_content_as_it_stands(
    family: Family, text: str, cuts: list[int]
) -> None:
    assert parsed(MarkedFormat(None, family.format), pieces(text, cuts)).content == text


@BY_NAME
@given(junk=st.text(st.sampled_from('ab {}[]<>"\\:,|\n'), max_size=40), cuts=CUTS)
def test_a_marker_before_what_is_no_call_is_content(
    family: Family, junk: str, cuts: list[int]
) -> None:
    text = f"so {family.format.begins[0]}{junk}"
    answer = parsed(MarkedFormat(None, family.format), pieces(text, cuts))
    assert answer == parsed(MarkedFormat(None, family.format), [text])
    assert answer.names or answer.content == text


def _is_plain(written: str) -> bool:
    """Whether the oracles, which cut at markers wherever they stand, can read it."""
    markers = ("<tool_call>\n{", "\n</tool_call>", "[ARGS]", "[TOOL_CALLS]")
    return not any(
        marker in dumps(written)[1:-1].replace("\\n", "\n")[12:-12] for marker in markers
    )
