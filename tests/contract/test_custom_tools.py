"""Chat's custom tools: to the model they are functions of one text, to the client texts."""

import json
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from tests.contract.scripted import CLIENT_SECONDS, HERMES_PING, TOOLS, USER, Daemon

GRAMMAR = {"syntax": "lark", "definition": 'start: "begin"'}
PATCH_TOOL = {
    "type": "custom",
    "custom": {
        "name": "apply_patch",
        "description": "Change files.",
        "format": {"type": "grammar", "grammar": GRAMMAR},
    },
}
PATCH = "*** Begin Patch\n+ë\n"
SAID = json.dumps({"name": "apply_patch", "arguments": {"input": PATCH}}, ensure_ascii=False)
CALL = f"<tool_call>\n{SAID}\n</tool_call>"


def test_a_call_is_its_text(hermes: Daemon) -> None:
    hermes.say("I patch." + CALL + HERMES_PING)
    choice = hermes.create(tools=[PATCH_TOOL, *TOOLS]).choices[0]
    patch, ping = choice.message.tool_calls
    assert (patch.type, patch.custom.name, patch.custom.input) == ("custom", "apply_patch", PATCH)
    assert (ping.type, ping.function.name) == ("function", "ping")
    assert choice.message.content == "I patch."
    assert choice.finish_reason == "tool_calls"


def test_the_model_is_told_of_a_function(hermes: Daemon) -> None:
    hermes.say("Fine.")
    hermes.create(tools=[PATCH_TOOL])
    (tool,) = hermes.given[1]["tools"]
    assert (tool["type"], tool["function"]["name"]) == ("function", "apply_patch")
    assert tool["function"]["description"].startswith("Change files.")
    assert GRAMMAR["definition"] in tool["function"]["description"]
    assert list(tool["function"]["parameters"]["properties"]) == ["input"]


def test_a_streamed_call_has_its_name_and_then_its_text(hermes: Daemon) -> None:
    """In the shape that OpenAI sends, which its client's types lack: it is not strict here."""
    hermes.say("I patch." + CALL + HERMES_PING + CALL)
    with OpenAI(base_url=f"{hermes.url}/v1", api_key="none", timeout=CLIENT_SECONDS) as lenient:
        asked: Any = {"messages": [USER], "tools": [PATCH_TOOL, *TOOLS], "stream": True}
        chunks = lenient.chat.completions.create(model="bytes", **asked)
        choices = [chunk.choices[0] for chunk in chunks]
    deltas = [call for choice in choices for call in choice.delta.tool_calls or ()]
    patches = [(call.index, call.id, call.type, call.custom) for call in deltas if call.index != 1]
    named, text, again, last = patches
    assert (named[0], named[2], named[3]) == (0, "custom", {"name": "apply_patch", "input": ""})
    assert named[1]
    assert again[1] not in {None, named[1]}
    assert text == (0, None, None, {"input": PATCH})
    assert last == (2, None, None, {"input": PATCH})
    assert [call.index for call in deltas].index(1) == 2, "the text comes before the next call"
    assert choices[-1].finish_reason == "tool_calls"


def test_half_a_character_is_replaced(hermes: Daemon) -> None:
    said = json.dumps({"name": "apply_patch", "arguments": {"input": "a\ud83d b"}})
    hermes.say(f"<tool_call>\n{said}\n</tool_call>")
    (call,) = hermes.create(tools=[PATCH_TOOL]).choices[0].message.tool_calls
    assert call.custom.input == "a\ufffd b"


def test_a_call_that_is_cut_off_has_what_there_is(hermes: Daemon) -> None:
    hermes.say(CALL)
    choice = hermes.create(tools=[PATCH_TOOL], max_tokens=70).choices[0]
    assert choice.finish_reason == "length"
    (patch,) = choice.message.tool_calls
    assert patch.custom.input.startswith('{"input": "***')


def test_history_has_the_function_that_was_called(hermes: Daemon) -> None:
    hermes.say("Fine.")
    custom = {"name": "apply_patch", "input": PATCH}
    call = {"id": "a", "type": "custom", "custom": custom}
    result = {"role": "tool", "tool_call_id": "a", "content": "done"}
    hermes.create(
        messages=[USER, {"role": "assistant", "tool_calls": [call]}, result], tools=[PATCH_TOOL]
    )
    _, assistant, told = hermes.given[0]
    (made,) = assistant["tool_calls"]
    assert made["function"] == {"name": "apply_patch", "arguments": {"input": PATCH}}
    assert (told["name"], told["content"]) == ("apply_patch", "done")


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "custom", "custom": {"name": "apply_patch"}},
        {
            "type": "allowed_tools",
            "allowed_tools": {
                "mode": "required",
                "tools": [{"type": "custom", "custom": {"name": "apply_patch"}}],
            },
        },
    ],
)
def test_one_that_is_chosen_is_called(hermes: Daemon, choice: Any) -> None:
    hermes.say(CALL)
    hermes.create(tools=[*TOOLS, PATCH_TOOL], tool_choice=choice)
    grammar = hermes.engine.submitted.queue[-1].constraint.grammar
    assert "apply_patch" in grammar.text
    assert "get_weather" not in grammar.text


BAD = [
    ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
    ({"tools": [{"type": "custom", "custom": {"name": "a b"}}]}, "tools[0].custom.name"),
    (
        {"tools": [{"type": "custom", "custom": {"name": "a", "format": {"type": "grammar"}}}]},
        "tools[0].custom.format",
    ),
    ({"tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "tool_choice"),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
def test_what_is_wrong_is_named(hermes: Daemon, fields: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        hermes.create(**fields)
    assert refused.value.param == param


def test_a_format_of_text_is_no_grammar(hermes: Daemon) -> None:
    hermes.say("Fine.")
    custom = {"name": "shell", "format": {"type": "text"}}
    answer = httpx.post(
        f"{hermes.url}/v1/chat/completions",
        json={"messages": [USER], "tools": [{"type": "custom", "custom": custom}]},
        timeout=CLIENT_SECONDS,
    )
    assert answer.status_code == 200
    assert "grammar" not in hermes.given[1]["tools"][0]["function"]["description"]
