"""Answers as models of each family write them, in `recorded/`: what they mean, in whatever pieces
they come.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from server.parsing.answer import MAX_REPARSE_CHARACTERS, MarkedFormat, ReasoningFormat
from server.parsing.formats import harmony
from server.parsing.reader import (
    AnswerStream,
    CallArguments,
    CallBegun,
    Calls,
    Content,
    Reader,
    Reasoning,
    openai_id,
)
from server.parsing.registry import TOOL_FORMATS, AnswerFormat
from tests.unit.parsing.answers import Answer, parsed

FAMILIES = {
    path.stem: yaml.safe_load(path.read_text("utf-8"))
    for path in sorted((Path(__file__).parent / "recorded").glob("*.yaml"))
}
CALLS = {name: call for family in FAMILIES.values() for name, call in family["calls"].items()}
"""By format: a call of `edit` for line 12 of a.py."""

TOOLS = {name: family["tools"] for family in FAMILIES.values() for name in family["calls"]}
LEADING = {"llama3_json", "pythonic"}
"""A call stands in place of an answer there."""

FORMATS = pytest.mark.parametrize("name", CALLS)
MARKED = pytest.mark.parametrize("name", [name for name in CALLS if name != "openai"])


@dataclass(frozen=True)
class Recorded:
    """An answer in a format, and what it means: arguments are values, or the text so far."""

    format: str
    text: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[Mapping[str, Any], ...] = ()


def recorded() -> Iterator[Any]:
    """All texts of all families, as each of a family's formats spells them."""
    for family in FAMILIES.values():
        for what, row in (*rows_of_values(family), *family.get("answers", {}).items()):
            means = {key: row[key] for key in ("content", "reasoning", "calls") if key in row}
            for name in row.get("formats", family["calls"]):
                for text in row.get("texts") or [row["text"]]:
                    spelled = respelled(text, family.get("spelled", {}).get(name, {}))
                    yield pytest.param(Recorded(name, spelled, **means), id=f"{name}: {what}")
        for name, texts in family.get("no calls", {}).items():
            for text in texts:
                yield pytest.param(Recorded(name, text, content=text), id=f"{name}: {text}")


def rows_of_values(family: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for table in family.get("values", []):
        for key, written, value in table["rows"]:
            text = table["in"].replace("KEY", key).replace("VALUE", written)
            calls = [{table["call"]: {key: value, **table.get("also", {})}}]
            yield f"{key} is {written}", {**table, "text": text, "calls": calls}


def respelled(text: str, markers: Mapping[str, str]) -> str:
    for marker, other in markers.items():
        text = text.replace(marker, other)
    return text


def answer_format(name: str) -> AnswerFormat:
    tools = TOOL_FORMATS[name]
    return harmony.Harmony(tools) if tools is harmony.TOOLS else MarkedFormat(None, tools)


def read(name: str, text: str) -> Answer:
    return parsed(answer_format(name), list(text), TOOLS[name])


def test_every_format_has_a_call() -> None:
    assert CALLS.keys() == TOOL_FORMATS.keys()


@pytest.mark.parametrize("answer", list(recorded()))
def test_what_is_recorded_means_the_same_in_pieces_of_each_length(answer: Recorded) -> None:
    for length in range(1, len(answer.text) + 1):
        pieces = [answer.text[at : at + length] for at in range(0, len(answer.text), length)]
        found = parsed(answer_format(answer.format), pieces, TOOLS[answer.format])
        assert (found.content, found.reasoning) == (answer.content, answer.reasoning)
        read = [
            {name: arguments if isinstance(told[name], str) else json.loads(arguments)}
            for name, arguments, told in zip(
                found.names, found.arguments, answer.calls, strict=True
            )
        ]
        assert read == list(answer.calls)


@FORMATS
def test_a_call_may_stand_between_content(name: str) -> None:
    content = "" if name in LEADING else "Let me see."
    assert read(name, f"{content}\n\n{CALLS[name]}\n") == Answer(
        content, names=["edit"], arguments=['{"path": "a.py", "line": 12}']
    )


@pytest.mark.parametrize("name", [name for name in CALLS if name != "pythonic"])
def test_a_call_may_follow_another(name: str) -> None:
    between = "; " if name == "llama3_json" else "\n"
    answer = read(name, f"{CALLS[name]}{between}{CALLS[name]}")
    assert answer.calls == [("edit", {"path": "a.py", "line": 12})] * 2
    assert not answer.content


@FORMATS
def test_a_name_is_sent_before_the_arguments_and_a_string_as_it_is_read(name: str) -> None:
    begin, _, _ = CALLS[name].partition("a.py")
    reader = Reader()
    calls = Calls(TOOLS[name], openai_id)
    stream = AnswerStream(reader, answer_format(name).read(reader, calls))
    # In Python's syntax the first key tells that it is a call.
    head = begin if name in ("lfm2", "olmo3", "pythonic") else begin[: begin.rindex("path")]
    sent = [part for character in head for part in stream.add(character)]
    assert [part.name for part in sent if isinstance(part, CallBegun)] == ["edit"]
    sent += stream.add(begin[len(head) :] + "a")
    assert not any(isinstance(part, Content) for part in sent)
    slices = [stream.add(character) for character in "_file"]
    assert slices == [[CallArguments(0, character)] for character in "_file"]


@FORMATS
def test_a_call_that_is_cut_off_stays_open(name: str) -> None:
    """Arguments of which some may be missing do not look complete."""
    text, _, _ = CALLS[name].partition("12")
    answer = read(name, text)
    assert answer.arguments[0].startswith('{"path": "a.py"')
    assert not answer.arguments[0].endswith("}")
    assert not answer.content


@MARKED
@pytest.mark.parametrize("junk", [" is how a call begins.", "<b>bold</b>", "\n\n<"])
def test_a_marker_that_begins_no_call_is_content(name: str, junk: str) -> None:
    text = f"A {TOOL_FORMATS[name].begins[0]}{junk}"
    assert read(name, text) == Answer(content=text)


def test_what_is_no_string_by_its_schema_is_sent_whole() -> None:
    reader = Reader()
    calls = Calls(TOOLS["qwen3_coder"], openai_id)
    stream = AnswerStream(reader, answer_format("qwen3_coder").read(reader, calls))
    stream.add("<tool_call>\n<function=edit>\n<parameter=tags>\n")
    for piece in ('["a", "b', '"]\n</parameter'):
        assert stream.add(piece) == []
    assert stream.add(">") == [CallArguments(0, '{"tags": ["a", "b"]')]


@pytest.mark.parametrize(
    "said", ["<|channel|>analysis<|message|>I", "<|channel|>final<|message|>I"]
)
def test_harmony_sends_messages_as_they_are_read(said: str) -> None:
    reader = Reader()
    stream = AnswerStream(reader, answer_format("openai").read(reader, Calls({}, openai_id)))
    stream.add(said)
    assert stream.add(" see") == [(Reasoning if "analysis" in said else Content)(" see")]


def test_nesting_has_a_bound() -> None:
    text = f"<|tool_call>call:f{{a:{'[' * 5000}{']' * 5000}}}<tool_call|>"
    value = parsed(answer_format("gemma4"), [text]).calls[0][1]["a"]
    for _ in range(64):
        (value,) = value
    assert value == "[" * 4936 + "]" * 4936
    assert json.dumps(value)
    brackets = "[" * 1900
    text = f"<tool_call><function=edit><parameter=tags>{brackets}</parameter></function>"
    answer = parsed(answer_format("qwen3_coder"), [text], TOOLS["qwen3_coder"])
    assert answer.calls == [("edit", {"tags": brackets})]


HERMES_CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
LONG = "word " * MAX_REPARSE_CHARACTERS


@MARKED
@pytest.mark.parametrize("before", ["", "<think>Hm.</think>"])
def test_white_space_before_a_call_may_be_long(name: str, before: str) -> None:
    format = MarkedFormat(ReasoningFormat("<think>", "</think>"), TOOL_FORMATS[name])
    answer = parsed(format, before + "\n" * 3000 + CALLS[name], TOOLS[name])
    assert (answer.content, answer.names) == ("", ["edit"])


@pytest.mark.parametrize("after", ["", "{", '{"id":'])
def test_white_space_between_a_marker_and_a_call_may_be_long(after: str) -> None:
    space = "\n" * 3000
    answer = read("hermes", f"<tool_call>{space}{after}{space}{HERMES_CALL}")
    assert answer == Answer(f"<tool_call>{space}{after}".rstrip(), names=["f"], arguments=["{}"])


@pytest.mark.parametrize("key", ["arguments", "id"])
def test_what_comes_before_a_name_may_be_long(key: str) -> None:
    text = f'<tool_call>{{"{key}": {{"k": "{LONG}"}}, "name": "f"}}</tool_call>'
    assert read("hermes", text).calls == [("f", {"k": LONG} if key == "arguments" else {})]


def test_of_a_long_text_that_is_no_call_the_last_characters_are_read_again() -> None:
    begin = f'<tool_call>{{"arguments": {{"k": "odd"quote" {HERMES_CALL}{LONG}'
    answer = read("hermes", begin + HERMES_CALL)
    assert answer == Answer(begin.rstrip(), names=["f"], arguments=["{}"])
