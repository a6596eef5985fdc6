"""Families with a syntax of their own: what their calls mean, and what is no call."""

import json

import pytest

from server.parsing.answer import MarkedFormat, ToolFormat
from server.parsing.formats.literal_calls import FUNCTION_GEMMA, GEMMA4, LFM2, PYTHONIC
from server.parsing.reader import AnswerStream, CallArguments, Calls, Reader
from tests.unit.parsing.answers import Answer, parsed, pieces

TOOLS: dict[str, dict[str, object]] = {"f": {}, "g": {}}


def read(format: ToolFormat, text: str) -> Answer:
    """The answer, which is the same wherever its text is cut."""
    marked = MarkedFormat(None, format)
    answer = parsed(marked, [text], TOOLS)
    assert parsed(marked, text, TOOLS) == answer
    for cut in range(len(text)):
        assert parsed(marked, pieces(text, [cut]), TOOLS) == answer
    return answer


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ('<|"|>x "q"}, \\n<b><|"|>', 'x "q"}, \\n<b>'),
        ('<|"|><|"|>', ""),
        ("-1.50", -1.5),
        ("true", True),
        ("None", None),
        ("12:30", "12:30"),
        ("{}", {}),
        ('[ <|"|>a<|"|>, <|"|>b<|"|> ,1]', ["a", "b", 1]),
        ('{b:[{c:<|"|>d<|"|>}],<|"|>e:f<|"|>:2}', {"b": [{"c": "d"}], "e:f": 2}),
        ('"as \\"JSON\\" \\u00e9"', 'as "JSON" é'),
        ('{"as": ["JSON", {"is": null}]}', {"as": ["JSON", {"is": None}]}),
        ("NaN", "NaN"),
    ],
)
def test_gemma_writes_values(written: str, value: object) -> None:
    text = f"<|tool_call>call:f{{a:{written},z:1}}<tool_call|>"
    assert read(GEMMA4, text).calls == [("f", {"a": value, "z": 1})]
    text = text.replace('<|"|>', "<escape>")
    text = text.replace("<|tool_call>", "<start_function_call>")
    text = text.replace("<tool_call|>", "<end_function_call><start_function_response>")
    assert read(FUNCTION_GEMMA, text).calls == [("f", {"a": value, "z": 1})]


def test_gemma_calls_several_functions() -> None:
    text = (
        "Wait.\n<|tool_call>call:f{}call:g{a:1}<tool_call|><|tool_call>call:f{b:2}<tool_call|>"
        "<|tool_response>"
    )
    answer = read(GEMMA4, text)
    assert answer.calls == [("f", {}), ("g", {"a": 1}), ("f", {"b": 2})]
    assert answer.content == "Wait."


def test_a_marker_closes_what_is_open_before_it() -> None:
    answer = read(GEMMA4, "<|tool_call>call:f{a:[1,{b:2<tool_call|> So.")
    assert answer.calls == [("f", {"a": [1, {"b": 2}]})]
    assert answer.content == "So."


@pytest.mark.parametrize(
    ("cut", "arguments"),
    [
        ('a:<|"|>half', '{"a": "half'),
        ('a:<|"|>half<|"', '{"a": "half<|\\"'),
        ("a:12", '{"a": '),
        ("a:1,b", '{"a": 1'),
        ("a:[1,", '{"a": [1'),
        ('a:"b\\', '{"a": '),
    ],
)
def test_what_is_cut_off_stays_open(cut: str, arguments: str) -> None:
    answer = read(GEMMA4, f"<|tool_call>call:f{{{cut}")
    assert answer.arguments == [arguments]
    assert answer.content == ""


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("'x'", "x"),
        ('"a\\n\\t\\\\\\x41\\u00e9\\U0001F600\\101\\q\\/"', "a\n\t\\Aé😀A\\q/"),
        ("'\\ud83d\\ude00'", "😀"),
        ("'''it's\na \"b\" '' c'''", "it's\na \"b\" '' c"),
        ('""', ""),
        ("'It's what templates write, isn't it?'", "It's what templates write, isn't it?"),
        ("-1.50", -1.5),
        ("0x1F", 31),
        ("1_000", 1000),
        (".5", 0.5),
        ("None", None),
        ("true", True),
        ("['it's', True, {'k': None, 2: \"v\"}]", ["it's", True, {"k": None, "2": "v"}]),
        ("(1, 'a')", [1, "a"]),
        ('{"as": ["JSON", {"is": null}]}', {"as": ["JSON", {"is": None}]}),
        ("today(1, [2])", "today(1, [2])"),
        ("inf", "inf"),
        ("[[1], [], {}, ]", [[1], [], {}]),
    ],
)
def test_python_writes_values(written: str, value: object) -> None:
    calls = [("f", {"a": value, "z": 1}), ("g", {})]
    answer = read(LFM2, f"Hm.<|tool_call_start|>[f(a={written}, z=1), g()]<|tool_call_end|>So.")
    assert (answer.calls, answer.content) == (calls, "Hm.So.")
    assert read(PYTHONIC, f"[f(a={written}, z=1), g()]").calls == calls
    assert (
        read(PYTHONIC, f"<|python_start|>[ f( a = {written} , z=1),g()]<|python_end|>").calls
        == calls
    )


@pytest.mark.parametrize(
    ("cut", "arguments"),
    [
        ("a='half", '{"a": "half'),
        ("a='half\\", '{"a": "half'),
        ("a='half\\u12", '{"a": "half\\\\u12'),
        ("a='whole'", '{"a": "whole"'),
        ("a=12", '{"a": '),
        ("a=1, b", '{"a": 1'),
    ],
)
def test_python_that_is_cut_off_stays_open(cut: str, arguments: str) -> None:
    answer = read(LFM2, f"<|tool_call_start|>[f({cut}")
    assert answer.arguments == [arguments]
    assert answer.content == ""


@pytest.mark.parametrize(
    "text",
    [
        "<|tool_call>is how",
        "<|tool_call>call:",
        "<|tool_call>call:no name{",
        "<|tool_call>call:{}",
    ],
)
def test_what_is_no_call_of_gemma_is_content(text: str) -> None:
    assert read(GEMMA4, text) == Answer(content=text)


@pytest.mark.parametrize(
    "text",
    [
        "<|tool_call_start|> is how",
        "<|tool_call_start|>[]",
        "<|tool_call_start|>[f('positional')]<|tool_call_end|>",
        "<|tool_call_start|>[f(*all)]",
        "<|tool_call_start|>[f(a==1)]",
        "<|tool_call_start|>[f(",
    ],
)
def test_what_is_no_call_in_python_is_content(text: str) -> None:
    assert read(LFM2, text) == Answer(content=text)


@pytest.mark.parametrize("text", ["[1] says so", "[unknown(a=1)]", "[x](y)", "So [f(a=1)]", "[f"])
def test_a_bare_list_is_a_call_only_of_what_is_declared(text: str) -> None:
    assert read(PYTHONIC, text) == Answer(content=text)


def test_what_is_no_call_behind_a_call_is_no_content() -> None:
    answer = read(LFM2, "<|tool_call_start|>[f(a=1, 'positional'), and more]<|tool_call_end|>So.")
    assert answer.calls == [("f", {"a": 1})]
    assert answer.content == "So."


@pytest.mark.parametrize(
    ("format", "text"),
    [
        (GEMMA4, '<|tool_call>call:f{a:[<|"|>some more words'),
        (LFM2, "<|tool_call_start|>[f(a=['some more words"),
    ],
    ids=["gemma4", "lfm2"],
)
def test_strings_are_streamed(format: ToolFormat, text: str) -> None:
    reader = Reader()
    calls = Calls({}, lambda name, index: "id")
    stream = AnswerStream(reader, MarkedFormat(None, format).read(reader, calls))
    stream.add(text[: -len("more words")])
    slices = [stream.add(character) for character in "more words"]
    assert slices == [[CallArguments(0, character)] for character in "more words"]


def test_nesting_has_a_bound() -> None:
    text = f"<|tool_call>call:f{{a:{'[' * 5000}{']' * 5000}}}<tool_call|>"
    value = parsed(MarkedFormat(None, GEMMA4), [text]).calls[0][1]["a"]
    for _ in range(64):
        (value,) = value
    assert value == "[" * 4936 + "]" * 4936
    assert json.dumps(value)


@pytest.mark.parametrize("key", ["a", "a-b", "a key", "größe", '"a, \\"key\\""', '"<"'])
def test_keys_may_be_odd(key: str) -> None:
    name = json.loads(key) if key.startswith('"') else key
    calls = [("f", {name: "x", "z": 1})]
    assert read(LFM2, f'<|tool_call_start|>[f({key}="x", z=1)]<|tool_call_end|>').calls == calls
    assert read(GEMMA4, f'<|tool_call>call:f{{{key}:"x",z:1}}<tool_call|>').calls == calls
