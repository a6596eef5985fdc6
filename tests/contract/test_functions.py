"""`functions` and `function_call`, which were there before tools: taken as tools, and answered as
they are asked."""

import json
from typing import Any

import openai
import pytest

from tests.contract.scripted import CALL, HERMES_CALL, HERMES_PING, USER, WEATHER, Daemon

PING: dict[str, Any] = {"name": "ping", "parameters": {"type": "object"}}
FUNCTIONS: list[Any] = [WEATHER["function"], PING]
PLACE = {"name": "get_weather", "arguments": '{"city": "Köln"}'}


def ask(hermes: Daemon, **fields: Any) -> Any:
    return hermes.openai.chat.completions.create(
        **{"model": "bytes", "messages": [USER], "functions": FUNCTIONS} | fields
    )


def test_a_call_comes_as_a_function_call(hermes: Daemon) -> None:
    hermes.say(HERMES_CALL)
    choice = ask(hermes).choices[0]
    assert choice.message.function_call.name == "get_weather"
    assert json.loads(choice.message.function_call.arguments) == CALL[1]
    assert (choice.message.content, choice.message.tool_calls) == (None, None)
    assert choice.finish_reason == "function_call"


def test_a_streamed_call_has_its_name_and_then_its_arguments(hermes: Daemon) -> None:
    hermes.say("Let me see." + HERMES_CALL)
    choices = [chunk.choices[0] for chunk in ask(hermes, stream=True)]
    assert "".join(choice.delta.content or "" for choice in choices) == "Let me see."
    first, *rest = [choice.delta.function_call for choice in choices if choice.delta.function_call]
    assert (first.name, first.arguments) == ("get_weather", "")
    assert {call.name for call in rest} == {None}
    assert json.loads("".join(call.arguments for call in rest)) == CALL[1]
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["function_call"]


@pytest.mark.parametrize("stream", [False, True])
def test_there_is_one_call_in_an_answer(hermes: Daemon, stream: bool) -> None:
    hermes.say(HERMES_CALL + HERMES_PING)
    answer = ask(hermes, stream=stream)
    if stream:
        calls = [chunk.choices[0].delta.function_call for chunk in answer]
        assert [call.name for call in calls if call and call.name] == ["get_weather"]
    else:
        assert answer.choices[0].message.function_call.name == "get_weather"


def test_an_answer_without_a_call_is_text(hermes: Daemon) -> None:
    hermes.say("Fine.")
    choice = ask(hermes).choices[0]
    assert (choice.message.content, choice.message.function_call) == ("Fine.", None)
    assert choice.finish_reason == "stop"


def test_the_model_is_told_of_tools(hermes: Daemon) -> None:
    hermes.say("Fine.")
    ask(hermes)
    assert hermes.given[1]["tools"] == [
        {"type": "function", "function": function} for function in FUNCTIONS
    ]
    ask(hermes, function_call="none")
    assert "tools" not in hermes.given[1]


def test_one_that_is_named_is_called(hermes: Daemon) -> None:
    hermes.say(HERMES_PING)
    choice = ask(hermes, function_call={"name": "ping"}).choices[0]
    assert choice.finish_reason == "function_call"
    grammar = hermes.engine.submitted.queue[-1].constraint.grammar
    assert "ping" in grammar.text
    assert "get_weather" not in grammar.text


def test_history_has_calls_and_their_results(hermes: Daemon) -> None:
    hermes.say("Fine.")
    result = {"role": "function", "name": "get_weather", "content": "rain"}
    messages = [USER, {"role": "assistant", "content": None, "function_call": PLACE}, result]
    ask(hermes, messages=messages)
    _, assistant, told = hermes.given[0]
    (call,) = assistant["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": {"city": "Köln"}}
    assert (told["role"], told["name"], told["content"]) == ("tool", "get_weather", "rain")
    assert told["tool_call_id"] == call["id"]


BAD = [
    ({"functions": [{"name": "a b"}]}, "functions[0].name"),
    ({"functions": [PING] * 1025}, "functions"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"function_call": "required"}, "function_call"),
    ({"tools": [WEATHER]}, "functions"),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
def test_what_is_wrong_is_named(hermes: Daemon, fields: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(hermes, **fields)
    assert refused.value.param == param
