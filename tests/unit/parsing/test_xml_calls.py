"""Typed families: examples of each, when its parts go out, and what becomes of what is broken."""

from typing import Any

import pytest

from server.parsing.answer import MarkedFormat, ToolFormat
from server.parsing.formats import xml_calls
from server.parsing.reader import (
    AnswerPart,
    AnswerStream,
    CallArguments,
    CallBegun,
    Calls,
    Content,
    Reader,
)
from tests.unit.parsing.answers import Answer, parsed

TOOLS: dict[str, Any] = {
    "edit": {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "line": {"type": "integer"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "force": {"type": "boolean"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "mode": {"$ref": "#/$defs/Mode"},
        },
        "$defs": {"Mode": {"enum": ["1", "2"]}},
    }
}
EXAMPLES = {
    "qwen3_coder": (
        "<tool_call>\n<function=edit>\n<parameter=path>\na.py\n</parameter>\n"
        "<parameter=line>\n12\n</parameter>\n</function>\n</tool_call>"
    ),
    "glm47": (
        "<tool_call>edit<arg_key>path</arg_key><arg_value>a.py</arg_value>"
        "<arg_key>line</arg_key><arg_value>12</arg_value></tool_call>"
    ),
    "glm45": (
        "<tool_call>edit\n<arg_key>path</arg_key>\n<arg_value>a.py</arg_value>\n"
        "<arg_key>line</arg_key>\n<arg_value>12</arg_value>\n</tool_call>"
    ),
    "laguna": (
        "<tool_call>edit<arg_key>path</arg_key><arg_value>a.py</arg_value>"
        "<arg_key>line</arg_key><arg_value>12</arg_value></tool_call>"
    ),
    "longcat": (
        "<longcat_tool_call>edit\n<longcat_arg_key>path</longcat_arg_key>\n"
        "<longcat_arg_value>a.py</longcat_arg_value>\n<longcat_arg_key>line</longcat_arg_key>\n"
        "<longcat_arg_value>12</longcat_arg_value>\n</longcat_tool_call>"
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="edit">\n<parameter name="path">a.py</parameter>\n'
        '<parameter name="line">12</parameter>\n</invoke>\n</minimax:tool_call>'
    ),
    "muse_spark": (
        '<atem:function_calls>\n<atem:invoke name="edit">\n<atem:parameter name="path">a.py'
        '</atem:parameter>\n<atem:parameter name="line">12</atem:parameter>\n</atem:invoke>\n'
        "</atem:function_calls>"
    ),
    "minicpm5": (
        '<function name="edit"><param name="path">a.py</param><param name="line">12</param>'
        "</function>"
    ),
    "deepseek_v32": (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="edit">\n'
        '<｜DSML｜parameter name="path" string="true">a.py</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="line" string="false">12</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>"
    ),
    "kimi_k3": (
        '<|open|>tools<|sep|><|open|>call tool="edit" index="1"<|sep|>'
        '<|open|>argument key="path" type="string"<|sep|>a.py<|close|>argument<|sep|>'
        '<|open|>argument key="line" type="number"<|sep|>12<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|>"
    ),
}
FORMATS = {
    format.name: format for format in vars(xml_calls).values() if isinstance(format, ToolFormat)
}
ALL = pytest.mark.parametrize("name", list(EXAMPLES))


def read(name: str, text: str) -> Answer:
    """What an answer says, one character at a time."""
    return parsed(MarkedFormat(None, FORMATS[name]), list(text), TOOLS)


def qwen(*parameters: tuple[str, str], name: str = "edit") -> str:
    written = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{written}</function>\n</tool_call>"


def test_every_format_has_an_example() -> None:
    assert FORMATS.keys() == EXAMPLES.keys()


@ALL
def test_a_call_between_content(name: str) -> None:
    answer = read(name, f"Let me see.\n\n{EXAMPLES[name]}\n")
    assert answer.content == "Let me see."
    assert answer.names == ["edit"]
    assert answer.arguments == ['{"path": "a.py", "line": 12}']


@ALL
def test_two_calls(name: str) -> None:
    answer = read(name, f"{EXAMPLES[name]}\n{EXAMPLES[name]}")
    assert answer.calls == [("edit", {"path": "a.py", "line": 12})] * 2
    assert not answer.content


@pytest.mark.parametrize("name", ["minimax_m2", "muse_spark", "deepseek_v32", "kimi_k3"])
def test_two_calls_in_one_section(name: str) -> None:
    opens = FORMATS[name].begins[0]
    closes = EXAMPLES[name][EXAMPLES[name].rindex("<" if name != "kimi_k3" else "<|close|>") :]
    inside = EXAMPLES[name].removeprefix(opens).removesuffix(closes)
    assert len(read(name, f"{opens}{inside}{inside}{closes}").calls) == 2


@ALL
def test_a_string_goes_out_before_its_end(name: str) -> None:
    """The name first, then all of the string but what may begin its end tag."""
    begin, _, _ = EXAMPLES[name].partition("a.py")
    stream = started(name)
    parts = stream.add(begin)
    assert [part.name for part in parts if isinstance(part, CallBegun)] == ["edit"]
    sent = "".join(part.text for part in parts if isinstance(part, CallArguments))
    for piece in ('some "', "quoted\n text", " of a long file", "\n<"):
        sent += "".join(arguments(stream.add(piece)))
    assert sent.startswith('{"path": "some \\"quoted\\n text of a long file')
    assert "<" not in sent


@ALL
def test_the_name_goes_out_before_the_parameters(name: str) -> None:
    """In GLM's syntax the first parameter's tag ends the name."""
    example = EXAMPLES[name]
    stream = started(name)
    sent = [part for piece in example[: example.index("path")] for part in stream.add(piece)]
    assert [type(part) for part in sent] == [CallBegun]


def test_what_is_no_string_goes_out_whole() -> None:
    stream = started("qwen3_coder")
    stream.add("<tool_call>\n<function=edit>\n<parameter=tags>\n")
    assert not stream.add('["a", "b')
    assert not stream.add('"]\n</parameter')
    assert "".join(arguments(stream.add(">"))) == '{"tags": ["a", "b"]'


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("line", "12", 12),
        ("line", " 12.0 ", 12),
        ("line", "many", "many"),
        ("line", "12.5", 12.5),
        ("line", "NaN", "NaN"),
        ("force", "true", True),
        ("force", "True", True),
        ("force", "yes", "yes"),
        ("tags", '["a"]', ["a"]),
        ("tags", "['a', True]", ["a", True]),
        ("tags", "{1, 2}", "{1, 2}"),
        ("tags", "[" * 1900, "[" * 1900),
        ("path", "null", "null"),
        ("path", "12", "12"),
        ("path", '{"a": 1}', '{"a": 1}'),
        ("note", "null", None),
        ("note", "nullify", "nullify"),
        ("note", "[1]", "[1]"),
        ("mode", "1", "1"),
        ("unknown", "12", "12"),
    ],
)
def test_values_are_what_the_schema_asks_for(key: str, text: str, value: object) -> None:
    assert read("qwen3_coder", qwen((key, text))).calls == [("edit", {key: value})]


@pytest.mark.parametrize(
    ("text", "value"), [("12", 12), ("[1, 2]", [1, 2]), ("so it is", "so it is")]
)
def test_glm_writes_json_unless_it_is_a_string(text: str, value: object) -> None:
    written = f"<tool_call>edit<arg_key>unknown</arg_key><arg_value>{text}</arg_value></tool_call>"
    assert read("glm47", written).calls == [("edit", {"unknown": value})]


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("qwen3_coder", "\n a.py \n"),
        ("glm47", "a.py"),
        ("minimax_m2", "a.py"),
        ("deepseek_v32", "\n\n a.py \n\n"),
        ("kimi_k3", "\n\n a.py \n\n"),
    ],
)
def test_white_space_around_a_string(name: str, path: str) -> None:
    text = EXAMPLES[name].replace("\na.py\n", "a.py").replace("a.py", "\n\n a.py \n\n")
    assert read(name, text).calls[0][1]["path"] == path


def test_cdata_may_contain_end_tags() -> None:
    text = '<function name="edit"><param name="path"><![CDATA[<p></param>\n]]></param></function>'
    assert read("minicpm5", text).calls == [("edit", {"path": "<p></param>\n"})]


def test_kimi_may_write_all_arguments_as_one_object() -> None:
    text = (
        '<|open|>tools<|sep|><|open|>call tool="edit" index="1"<|sep|>'
        '<|open|>json type="object"<|sep|>{"path": "a.py"}<|close|>json<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|>"
    )
    assert read("kimi_k3", text).calls == [("edit", {"path": "a.py"})]


def test_glm_may_write_an_object_in_place_of_a_call() -> None:
    text = '<tool_call>{"name": "edit", "arguments": {"line": 1}}</tool_call>'
    assert read("glm47", text).calls == [("edit", {"line": 1})]


def test_qwen_may_forget_the_outer_tag() -> None:
    text = qwen(("line", "1")).removeprefix("<tool_call>\n")
    assert read("qwen3_coder", f"So:\n{text}").calls == [("edit", {"line": 1})]


@ALL
@pytest.mark.parametrize("junk", [" is how a call begins.", "<b>bold</b>", "\n\n<"])
def test_a_marker_that_begins_no_call_is_content(name: str, junk: str) -> None:
    text = f"A {FORMATS[name].begins[0]}{junk}"
    assert read(name, text) == Answer(content=text)


@ALL
def test_a_call_that_is_cut_off_stays_open(name: str) -> None:
    """Arguments of which some may be missing do not look complete."""
    text, _, _ = EXAMPLES[name].partition("12")
    answer = read(name, text)
    assert answer.arguments == ['{"path": "a.py"']
    assert not answer.content


def test_a_next_call_ends_one_that_has_no_end() -> None:
    call = "<tool_call>edit<arg_key>line</arg_key><arg_value>1</arg_value>"
    assert read("glm47", call + EXAMPLES["glm47"]).calls == [
        ("edit", {"line": 1}),
        ("edit", {"path": "a.py", "line": 12}),
    ]


def test_what_is_no_second_call_is_not_shown() -> None:
    text = EXAMPLES["minimax_m2"].replace("</invoke>", "</invoke><invoke of what?>")
    assert read("minimax_m2", f"{text} Done.") == Answer(
        content=" Done.", names=["edit"], arguments=['{"path": "a.py", "line": 12}']
    )


def started(name: str) -> AnswerStream:
    reader = Reader()
    calls = Calls(TOOLS, lambda name, index: f"id-{index}")
    return AnswerStream(reader, MarkedFormat(None, FORMATS[name]).read(reader, calls))


def arguments(parts: list[AnswerPart]) -> list[str]:
    assert not any(isinstance(part, Content) for part in parts)
    return [part.text for part in parts if isinstance(part, CallArguments)]
