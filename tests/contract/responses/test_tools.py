"""Functions, custom tools and namespaces: what the model is told, and what a client gets back."""

import json
import logging
from functools import partial
from typing import Any

import pytest

from engine.api import NoGrammars
from engine.values.request import GrammarKind, Request
from tests.contract.responses.conftest import PATCH_TOOL, WEATHER_TOOL, Created
from tests.contract.scripted import (
    CALL,
    HERMES_CALL,
    HERMES_PING,
    WEATHER,
    Daemon,
    RecordingTokenizer,
)

CLOSE = {"type": "function", "name": "close", "strict": False, "parameters": {"type": "object"}}
AGENTS = {"type": "namespace", "name": "agents", "description": "Agents.", "tools": [CLOSE]}
PATCH = "*** Begin Patch\n+ë\n"


def call(name: str, arguments: object) -> str:
    """A call as the model writes it."""
    said = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{said}\n</tool_call>"


def told(hermes: Daemon) -> dict[str, dict[str, Any]]:
    """The functions that the template was given, by name."""
    _, arguments = hermes.given
    return {tool["function"]["name"]: tool["function"] for tool in arguments.get("tools", [])}


def test_a_function_is_called(hermes: Daemon, create: Created) -> None:
    hermes.say("Let me see." + HERMES_CALL + HERMES_PING)
    response = create(tools=[WEATHER_TOOL])
    message, weather, ping = response.output
    assert message.content[0].text == response.output_text == "Let me see."
    assert (weather.type, weather.name, weather.status) == (
        "function_call", "get_weather", "completed",
    )  # fmt: skip
    assert json.loads(weather.arguments) == CALL[1]
    assert ping.name == "ping", "which the model made up"
    assert weather.call_id != ping.call_id
    assert told(hermes) == {"get_weather": WEATHER["function"]}
    assert [tool.name for tool in response.tools] == ["get_weather"]


SEARCH = {"type": "tool_search_call", "call_id": "s", "execution": "client",
          "arguments": {"query": "weather"}}  # fmt: skip
ASKED = {"role": "user", "content": "How is the weather?"}


def found(*tools: Any) -> dict[str, Any]:
    return {"type": "tool_search_output", "call_id": "s", "execution": "client", "tools": tools}


def additional(*tools: Any) -> dict[str, Any]:
    return {"type": "additional_tools", "role": "developer", "tools": tools}


def test_tools_that_come_first_in_the_input_are_like_any_others(
    hermes: Daemon, create: Created
) -> None:
    """Codex sends them so under a model name that it knows."""
    create(input=[additional(WEATHER_TOOL, AGENTS), ASKED])
    told_so = hermes.given
    create(input=[ASKED], tools=[WEATHER_TOOL, AGENTS])
    assert hermes.given == told_so
    hermes.say(call("agents__close", {}))
    (closed,) = create(input=[additional(WEATHER_TOOL, AGENTS), ASKED]).output
    assert (closed.name, closed.namespace) == ("close", "agents")


@pytest.mark.parametrize("item", [found, additional])
def test_tools_that_come_later_are_described_there(
    hermes: Daemon, create: Created, item: Any
) -> None:
    create(input=[ASKED], tools=[PATCH_TOOL])
    before, tools = hermes.given[0], told(hermes)
    hermes.say(HERMES_CALL)
    later = [SEARCH, item(WEATHER_TOOL), {"role": "user", "content": "Go on."}]
    (weather,) = create(input=[ASKED, *later], tools=[PATCH_TOOL]).output
    assert weather.name == "get_weather"
    assert hermes.given[0][: len(before)] == before
    assert told(hermes) == tools
    searched, described = hermes.given[0][1:3]
    (made,) = searched["tool_calls"]
    assert made["function"] == {"name": "tool_search", "arguments": {"query": "weather"}}
    assert "can be called" in described["content"]
    assert '"name": "get_weather"' in described["content"]


def test_a_summary_without_tools_keeps_them_in_the_prompt() -> None:
    """The turn in which Codex compacts a conversation."""
    made = {"type": "function_call", "call_id": "once", "name": "get_weather", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "once", "output": "Rain."}
    asked = [ASKED, made, output]
    said = {"role": "assistant", "content": "It rains."}
    tokenizer = RecordingTokenizer(added_tokens={"<|end|>": 256, "<tool_call>": 255})
    with Daemon.serving(tokenizer) as marked:
        create = partial(marked.openai.responses.create, model="bytes")
        create(input=asked, tools=[WEATHER_TOOL])
        before, tools = marked.given[0], told(marked)
        create(input=[*asked, said, {"role": "user", "content": "Sum up."}], tools=[])
        assert marked.given[0][: len(before)] == before
        assert told(marked) == tools
        assert (255,) in marked.asked.sampling.bad_words


def test_history_is_one_message_with_all_calls(hermes: Daemon, create: Created) -> None:
    """The items of one answer, in a row; two answers are two messages."""
    create(
        input=[
            {"role": "user", "content": "Hi"},
            {"type": "reasoning", "id": "rs_1", "summary": [],
             "content": [{"type": "reasoning_text", "text": "Well."}]},
            {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
             "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
            {"type": "function_call", "call_id": "a", "name": "look", "arguments": '{"x": 1}'},
            {"type": "function_call", "call_id": "b", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": "one"},
            {"type": "function_call_output", "call_id": "b",
             "output": [{"type": "input_text", "text": "two"}]},
            {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "three"},
        ]
    )  # fmt: skip
    _, answer, first, second, again, third = hermes.given[0]
    assert (answer["content"], answer["reasoning_content"]) == ("I look.", "Well.")
    assert [made["id"] for made in answer["tool_calls"]] == ["a", "b"]
    assert answer["tool_calls"][0]["function"] == {"name": "look", "arguments": {"x": 1}}
    assert [(result["role"], result["tool_call_id"], result["content"]) for result in
            (first, second, third)] == [("tool", "a", "one"), ("tool", "b", "two"),
                                        ("tool", "c", "three")]  # fmt: skip
    assert [made["id"] for made in again["tool_calls"]] == ["c"]


def test_a_tool_may_show_what_the_model_cannot_see(hermes: Daemon, create: Created) -> None:
    """An agent goes on where its tool has brought a picture."""
    picture = {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "low"}
    create(
        input=[
            {"role": "user", "content": "Hi"},
            {"type": "function_call", "call_id": "a", "name": "view", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": [picture]},
        ]
    )
    assert "reads text alone" in hermes.given[0][-1]["content"]


def test_a_custom_tool_takes_text(hermes: Daemon, create: Created) -> None:
    hermes.say(call("apply_patch", {"input": PATCH}))
    response = create(tools=[PATCH_TOOL])
    (made,) = response.output
    assert (made.type, made.name, made.input) == ("custom_tool_call", "apply_patch", PATCH)
    function = told(hermes)["apply_patch"]
    assert function["description"].startswith("Change files.")
    assert 'start: "begin"' in function["description"]
    assert list(function["parameters"]["properties"]) == ["input"]
    assert response.tools[0].format.syntax == "lark"


def test_a_custom_call_is_streamed(hermes: Daemon, create: Created) -> None:
    hermes.say(call("apply_patch", {"input": PATCH}))
    events = list(create(tools=[PATCH_TOOL], stream=True))
    of_input = [event for event in events if "custom_tool_call_input" in event.type]
    assert [event.type.rpartition(".")[2] for event in of_input] == ["delta", "done"]
    assert of_input[0].delta == of_input[1].input == PATCH
    added = next(event.item for event in events if event.type == "response.output_item.added")
    assert (added.type, added.input) == ("custom_tool_call", "")
    assert events[-1].response.output[0].input == PATCH


@pytest.mark.parametrize("stream", [False, True])
def test_half_a_character_in_a_custom_call_is_replaced(
    hermes: Daemon, create: Created, stream: bool
) -> None:
    """The escape is JSON, and means what no UTF-8 can say."""
    said = r'{"name": "apply_patch", "arguments": {"input": "a\ud83d b \ud83d\ude00"}}'
    hermes.say(f"<tool_call>\n{said}\n</tool_call>")
    made = create(tools=[PATCH_TOOL], stream=stream)
    response = list(made)[-1].response if stream else made
    assert response.status == "completed"
    assert response.output[0].input == "a\ufffd b \U0001f600"


def test_half_a_character_in_a_name_or_in_arguments_as_text_is_replaced(
    hermes: Daemon, create: Created
) -> None:
    said = r'{"name": "look\ud83d", "arguments": "{\"a\": \"\ud83d\"}"}'
    hermes.say(f"<tool_call>\n{said}\n</tool_call>")
    (made,) = create(tools=[PATCH_TOOL]).output
    assert (made.name, made.arguments) == ("look\ufffd", '{"a": "\ufffd"}')


def test_a_custom_call_comes_back(hermes: Daemon, create: Created) -> None:
    hermes.say(call("apply_patch", {"input": PATCH}))
    first = create(tools=[PATCH_TOOL])
    output = {"type": "custom_tool_call_output", "call_id": first.output[0].call_id}
    create(previous_response_id=first.id, input=[output | {"output": "Done."}], tools=[PATCH_TOOL])
    _, answer, result = hermes.given[0]
    function = answer["tool_calls"][0]["function"]
    assert function == {"name": "apply_patch", "arguments": {"input": PATCH}}
    assert (result["role"], result["content"]) == ("tool", "Done.")


def test_tools_of_a_namespace(hermes: Daemon, create: Created) -> None:
    """The model has one name for each; the client its own two, there and back."""
    hermes.say(call("agents__close", {"target": 1}))
    first = create(tools=[AGENTS, CLOSE])
    assert set(told(hermes)) == {"agents__close", "close"}
    (made,) = first.output
    assert (made.name, made.namespace) == ("close", "agents")
    output = {"type": "function_call_output", "call_id": made.call_id, "output": "Closed."}
    sent = [{"role": "user", "content": "Hi"}, made.model_dump(exclude_none=True), output]
    create(input=sent, tools=[AGENTS, CLOSE])
    assert hermes.given[0][1]["tool_calls"][0]["function"]["name"] == "agents__close"


def test_hosted_tools_are_dropped_with_a_note(
    hermes: Daemon, create: Created, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "rootstock.history"):
        forged = {"type": "web_search\nINFO forged"}
        response = create(tools=[{"type": "web_search"}, forged, WEATHER_TOOL])
    assert set(told(hermes)) == {"get_weather"}
    assert [tool.type for tool in response.tools] == ["function"]
    (line,) = (line for line in caplog.messages if "web_search" in line)
    assert "\n" not in line


@pytest.mark.parametrize(
    ("choice", "functions"),
    [
        ("required", ["get_weather", "apply_patch", "agents__close"]),
        ({"type": "function", "name": "get_weather"}, ["get_weather"]),
        ({"type": "custom", "name": "apply_patch"}, ["apply_patch"]),
        ({"type": "function", "name": "close", "namespace": "agents"}, ["agents__close"]),
        (
            {"type": "allowed_tools", "mode": "required",
             "tools": [{"type": "function", "name": "get_weather"},
                       {"type": "custom", "name": "apply_patch"}]},
            ["get_weather", "apply_patch"],
        ),
    ],
)  # fmt: skip
def test_a_choice_is_enforced(
    hermes: Daemon, create: Created, choice: Any, functions: list[str]
) -> None:
    tools = [WEATHER_TOOL, PATCH_TOOL, AGENTS]
    create(tools=tools, tool_choice=choice)
    constraint = hermes.engine.submitted.get_nowait().constraint
    assert constraint is not None
    grammar = constraint.grammar
    assert grammar.kind is GrammarKind.LARK
    names = ["get_weather", "apply_patch", "agents__close"]
    assert [name for name in names if name in grammar.text] == functions
    assert set(told(hermes)) == set(names), "so that the prompt is the same from turn to turn"


def test_none_and_auto_enforce_nothing(hermes: Daemon, create: Created) -> None:
    for choice in ("none", "auto"):
        create(tools=[WEATHER_TOOL], tool_choice=choice)
        assert hermes.engine.submitted.get_nowait().constraint is None
    assert set(told(hermes)) == {"get_weather"}


def function(parameters: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"type": "function", "name": "look", "parameters": parameters} | fields


CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
LOOKS_AROUND = {"type": "object", "properties": {"at": {"type": "string", "pattern": "a(?=b)"}}}


@pytest.mark.parametrize(
    ("tool", "strict"),
    [
        (function(CITY), True),
        (function(CITY, strict=None), True),
        (function(CITY, strict=True), True),
        (function(CITY, strict=False), False),
        (function({}), True),
        (function(LOOKS_AROUND), False),
        (function(LOOKS_AROUND, strict=False), False),
    ],
)
def test_a_function_is_strict_where_the_client_says_nothing_and_a_grammar_can_enforce_it(
    hermes: Daemon, create: Created, tool: dict[str, Any], strict: bool
) -> None:
    """As at OpenAI, whose chat completions differ. The answer says what is applied."""
    response = create(tools=[tool], tool_choice="required")
    constraint = hermes.engine.submitted.get_nowait().constraint
    assert constraint is not None
    assert ('"lenient": false' in constraint.grammar.text) is strict
    assert response.tools[0].strict is strict


def test_a_function_in_a_namespace_is_strict_likewise(hermes: Daemon, create: Created) -> None:
    tools = [function(CITY), function(LOOKS_AROUND, name="other")]
    response = create(
        tools=[{"type": "namespace", "name": "n", "description": "d", "tools": tools}]
    )
    assert [tool["strict"] for tool in response.model_dump()["tools"][0]["tools"]] == [True, False]


def test_where_no_grammar_can_be_tried_a_function_is_strict_only_on_request(
    hermes: Daemon, create: Created, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def untried(request: Request) -> None:
        raise NoGrammars("no more processes")

    monkeypatch.setattr(hermes.engine, "check", untried)
    tools = [function(CITY), function(CITY, name="other", strict=True)]
    response = create(tools=tools)
    assert [tool.strict for tool in response.tools] == [False, True]
