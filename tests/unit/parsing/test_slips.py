"""What models write that no template does: only calls become calls, and markup is never content."""

import pytest

from server.parsing.registry import Formats, answer_format
from tests.unit.parsing.answers import Answer, parsed

WEATHER = {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = {"f": {}, "now": {}, "get_weather": WEATHER, "edit_2": {}}

LENGTHS = pytest.mark.parametrize("length", [1, 3, 1000])


def read(name: str, text: str, length: int, reasoning: str | None = None) -> Answer:
    pieces = [text[at : at + length] for at in range(0, len(text), length)]
    return parsed(answer_format(Formats(name, reasoning)), pieces, TOOLS)


@LENGTHS
@pytest.mark.parametrize("name", ["llama3_json", "pythonic"])
@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Alice", "age": 30}',
        '{"id": 7, "name": "Alice"}',
        '{"type": "person", "name": "Alice", "parameters": {"x": 1}}',
        '{"parameters": {"x": 1}, "name": "Alice"}',
        '[{"name": "Alice"}, 2]',
        "[Alice(age=30)]",
    ],
)
def test_an_object_with_a_name_is_content_unless_it_names_a_function(
    name: str, text: str, length: int
) -> None:
    assert read(name, text, length) == Answer(content=text)


@LENGTHS
@pytest.mark.parametrize(
    ("name", "text", "n_calls"),
    [
        ("llama3_json", '{"name": "f", "parameters": {}}; {"name": "f", "parameters": {}}', 2),
        ("llama3_json", '{"name": "f", "parameters": {}}\n{"name": "f", "parameters": {}}', 2),
        ("llama3_json", '{"name": "f", "parameters": {}}, {"name": "f", "parameters": {}}', 2),
        ("pythonic", "[f()]\n[f()]", 2),
        ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {}}', 1),
        ("mistral", '[TOOL_CALLS][{"name": "f"} {"name": "f"}]', 2),
        ("hermes", '<tool_call>\n{"name": "f"}\n{"name": "f"}\n</tool_call>', 2),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>,\n<tool_call>{"name": "f"}', 2),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}}}</tool_call>', 1),
    ],
)
def test_calls_stand_side_by_side(name: str, text: str, n_calls: int, length: int) -> None:
    assert read(name, text, length) == Answer(names=["f"] * n_calls, arguments=["{}"] * n_calls)


@LENGTHS
def test_what_follows_a_call_and_is_none_is_content(length: int) -> None:
    call = '{"name": "f", "parameters": {}}'
    for after in ("; and so on", ', {"name": "Alice"}', '\n{"a": 1}'):
        answer = read("llama3_json", call + after, length)
        assert answer == Answer(after, names=["f"], arguments=["{}"])


@LENGTHS
@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("functions.f:0", "f"),
        ("functions.unknown:3", "unknown"),
        ("functions_f_1", "f"),
        ("functionsf5", "f"),
        ("f_2", "f"),
        ("f", "f"),
        ("functions.edit_2", "edit_2"),
        ("functions.edit_2_7", "edit_2"),
    ],
)
def test_kimi_names_a_function_in_its_id(written: str, name: str, length: int) -> None:
    text = (
        f"<|tool_calls_section_begin|><|tool_call_begin|>{written}<|tool_call_argument_begin|>"
        "{}<|tool_call_end|><|tool_calls_section_end|>"
    )
    assert read("kimi_k2", text, length) == Answer(names=[name], arguments=["{}"])


@LENGTHS
@pytest.mark.parametrize("tag", ["</arg_value>", "</arg_key>", "<arg_value>"])
def test_a_tag_too_many_is_dropped(tag: str, length: int) -> None:
    text = f"<tool_call>now{tag}</tool_call>"
    assert read("glm47", text, length) == Answer(names=["now"], arguments=["{}"])


@LENGTHS
@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("</think>\n\nHello there.", "", "Hello there."),
        ("</think>Hello </think>there.", "", "Hello there."),
        ("</think>\n</think>\nHello.", "", "Hello."),
        ("<think>a</think>b</think>\nc", "a", "b\nc"),
        ("<think><think>a <think>b</think>c", "ab", "c"),
        ("</think><think>a</think>b", "a", "b"),
    ],
)
def test_markers_of_reasoning_are_never_shown(
    text: str, reasoning: str, content: str, length: int
) -> None:
    for name in ("hermes", "glm47", "llama3_json"):
        assert read(name, text, length, "deepseek_r1") == Answer(content, reasoning)


@LENGTHS
@pytest.mark.parametrize(
    ("name", "call", "ids"),
    [
        (
            "kimi_k2",
            "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
            ["functions.f:0"],
        ),
        ("mistral_args", "[TOOL_CALLS]f[CALL_ID]abc123456[ARGS]{}", ["abc123456"]),
    ],
)
def test_the_first_of_two_calls_keeps_an_id_that_both_have(
    name: str, call: str, ids: list[str], length: int
) -> None:
    answer = read(name, call * 3, length)
    assert answer.names == ["f"] * 3
    assert answer.ids[:1] == ids
    assert len(set(answer.ids)) == 3


@LENGTHS
@pytest.mark.parametrize(
    ("first", "city"),
    [("Oslo\n", "Oslo"), ("Oslo", "Oslo"), ("a\n\n", "a\n"), ("<b>\n</b>\n", "<b>\n</b>")],
)
def test_a_parameter_ends_where_the_line_of_another_begins(
    first: str, city: str, length: int
) -> None:
    text = (
        f"<tool_call>\n<function=get_weather>\n<parameter=city>\n{first.removesuffix(chr(10))}\n"
        "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
    )
    answer = read("qwen3_coder", text, length)
    assert answer.calls == [("get_weather", {"city": city, "days": 2})]
    assert answer.content == ""


@LENGTHS
def test_a_line_that_begins_no_other_parameter_is_text(length: int) -> None:
    """Of a name that is not declared, or has been given, or within a line."""
    city = "x <parameter=days>\n<parameter=other>\n1\n<parameter=city>\ny"
    text = (
        f"<tool_call>\n<function=get_weather>\n<parameter=city>\n{city}\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
    )
    answer = read("qwen3_coder", text, length)
    assert answer.calls == [("get_weather", {"city": city, "days": 2})]
