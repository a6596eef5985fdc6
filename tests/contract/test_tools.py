"""Tools over a real socket: a scripted engine says what models of each family say, and the openai
client gets calls."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import httpx
import openai
import pytest

from engine.values.model import NO_REPLAYS, Replay
from engine.values.request import GrammarKind
from server.parsing.parameters import MAX_REFERENCE_STEPS
from tests.contract.scripted import (
    CALL,
    HERMES_CALL,
    HERMES_PING,
    NO_ARGUMENTS,
    TOOLS,
    USER,
    Daemon,
    OpeningTokenizer,
    RecordingTokenizer,
)


@dataclass(frozen=True)
class TextualTokenizer(RecordingTokenizer):
    """Its template puts arguments together with text, as DeepSeek's do."""

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        replays: Mapping[int, Replay] = NO_REPLAYS,
        /,
        **template_arguments: object,
    ) -> list[int]:
        ids = super().apply_chat_template(messages, replays, **template_arguments)
        for message in messages:
            for call in cast(list[Any], message.get("tool_calls", [])):
                if not isinstance(call["function"]["arguments"], str):
                    raise ValueError("the chat template refuses the messages: no text")
        return ids


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [
        (call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls
    ]


def test_calls_are_streamed_in_slices(hermes: Daemon) -> None:
    """Id and name first, then slices; no markup in what the user sees."""
    hermes.say(HERMES_CALL + HERMES_PING)
    names: dict[int, str] = {}
    arguments: dict[int, list[str]] = {}
    chunks = list(hermes.create(stream=True))
    for chunk in chunks:
        (choice,) = chunk.choices
        assert not choice.delta.content
        for call in choice.delta.tool_calls or ():
            if call.id is not None:
                assert call.index == len(names)
                assert call.type == "function"
                names[call.index] = call.function.name
                arguments[call.index] = []
            arguments[call.index].append(call.function.arguments)
    assert list(names.values()) == ["get_weather", "ping"]
    assert [json.loads("".join(slices)) for slices in arguments.values()] == [CALL[1], {}]
    assert len(arguments[0]) > 5, "the arguments came in one piece"
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:]] == [None, "tool_calls"]


@pytest.mark.parametrize("field", ["tools", "functions"])
def test_a_schema_that_takes_too_many_steps_is_refused(hermes: Daemon, field: str) -> None:
    reference = {"$ref": "#" + "/a" * (MAX_REFERENCE_STEPS + 1)}
    function = {"name": "f", "parameters": {"properties": {"p": reference}}}
    declared = [{"type": "function", "function": function}] if field == "tools" else [function]
    body = {"messages": [USER], field: declared}
    answer = httpx.post(f"{hermes.url}/v1/chat/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field)
    assert (
        f"{field}: the path of a $ref has more than {MAX_REFERENCE_STEPS} steps"
        in (error["message"])
    )


def test_reasoning_counts_the_same_where_a_stream_lags_behind(hermes: Daemon) -> None:
    counts = []
    for steps_at_once in (1, 450):
        hermes.say("<think>\nHm, <tool_call>?\n</think>\n\nLet me see.\n")
        hermes.engine.script.steps_at_once = steps_at_once
        *_, last = hermes.create(stream=True, stream_options={"include_usage": True})
        counts.append(last.usage.completion_tokens_details.reasoning_tokens)
    assert counts[0] == counts[1]
    assert 16 <= counts[0] <= 32


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_that_the_template_has_begun(stream: bool) -> None:
    with Daemon.serving(OpeningTokenizer()) as opened:
        opened.say("I wonder.</think>\n\nYes.")
        answer = opened.create(stream=stream)
        messages = (
            [chunk.choices[0].delta for chunk in answer] if stream else [answer.choices[0].message]
        )
    assert "".join(message.content or "" for message in messages) == "Yes."
    thoughts = [(message.model_extra or {}).get("reasoning_content") or "" for message in messages]
    assert "".join(thoughts) == "I wonder."


def test_what_is_no_call_is_content(hermes: Daemon) -> None:
    hermes.say("I would use <tool_call> here.")
    (choice,) = hermes.create().choices
    assert choice.message.content == "I would use <tool_call> here."
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"


def test_without_tools_markup_is_text(hermes: Daemon) -> None:
    hermes.say(HERMES_PING)
    without: tuple[dict[str, Any], ...] = ({"tools": []}, {"tool_choice": "none"})
    for fields in without:
        (choice,) = hermes.create(**fields).choices
        assert choice.message.content == HERMES_PING
        assert choice.finish_reason == "stop"
        _, arguments = hermes.given
        assert "tools" not in arguments


def test_every_choice_has_calls_of_its_own(hermes: Daemon) -> None:
    hermes.say(HERMES_CALL, "No need.", HERMES_PING)
    one, two, three = hermes.create(n=3).choices
    assert calls_of(one.message) == [CALL]
    assert two.message.content == "No need."
    assert calls_of(three.message) == [NO_ARGUMENTS]
    reasons = [choice.finish_reason for choice in (one, two, three)]
    assert reasons == ["tool_calls", "stop", "tool_calls"]


def test_logprobs_stand_beside_calls(hermes: Daemon) -> None:
    hermes.say(HERMES_PING)
    whole = hermes.create(logprobs=True).choices[0].logprobs.content
    streamed = [
        entry
        for chunk in hermes.create(logprobs=True, stream=True)
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert len(whole) == len(HERMES_PING)
    assert [entry.token for entry in streamed] == [entry.token for entry in whole]


def test_an_answer_that_was_begun_is_continued(hermes: Daemon) -> None:
    messages = [USER, {"role": "assistant", "content": "It is"}]
    hermes.create(messages=messages, extra_body={"continue_final_message": True})
    given, arguments = hermes.given
    assert given[-1] == messages[-1]
    assert arguments["continue_final_message"] is True
    assert arguments["add_generation_prompt"] is False


def test_history_reaches_the_template_as_templates_want_it(hermes: Daemon) -> None:
    """Arguments as objects, content as text, results with their functions' names."""
    hermes.say("Fine.")
    call = {"id": "call_1", "type": "function"}
    call["function"] = {"name": "get_weather", "arguments": '{"city": "Köln"}'}  # type: ignore[assignment]
    history = [
        {"role": "developer", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "rain"}]},
        {"role": "assistant", "content": "It rains.", "reasoning": "So."},
        USER,
    ]
    hermes.create(messages=history)
    messages, arguments = hermes.given
    assert [message["role"] for message in messages[:2]] == ["system", "user"]
    assistant, result, answer = messages[2:5]
    assert assistant["content"] == ""
    assert assistant["reasoning_content"] == "Hm."
    assert assistant["tool_calls"][0]["function"]["arguments"] == {"city": "Köln"}
    assert (result["content"], result["name"]) == ("rain", "get_weather")
    assert result["tool_call_id"] == "call_1"
    assert answer["reasoning_content"] == "So."
    assert arguments["tools"] == TOOLS


def test_arguments_may_be_an_object(hermes: Daemon) -> None:
    """mlx_lm.server takes them so."""
    hermes.say("Fine.")
    call = {"id": "c", "type": "function", "function": {"name": "ping", "arguments": {"a": "ë"}}}
    result = {"role": "tool", "tool_call_id": "c", "content": "pong"}
    hermes.create(messages=[USER, {"role": "assistant", "tool_calls": [call]}, result])
    messages, _ = hermes.given
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": "ë"}


def test_a_template_that_wants_arguments_as_text_gets_them(no_settings_from_outside: None) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "ping", "arguments": '{"a": 1}'}}
    result = {"role": "tool", "tool_call_id": "c", "content": "pong"}
    with Daemon.serving(TextualTokenizer(), tool_parser="deepseek_v31") as textual:
        textual.say("Fine.")
        textual.create(messages=[USER, {"role": "assistant", "tool_calls": [call]}, result])
        messages, _ = textual.given
        assert messages[1]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'


def test_what_else_the_template_is_told(hermes: Daemon) -> None:
    hermes.say("Fine.")
    kwargs = {"chat_template_kwargs": {"enable_thinking": True, "style": "short"}}
    hermes.create(reasoning_effort="high", extra_body=kwargs)
    _, arguments = hermes.given
    assert arguments["reasoning_effort"] == "high"
    assert (arguments["enable_thinking"], arguments["style"]) == (True, "short")
    hermes.create(reasoning_effort="none")
    assert hermes.given[1]["enable_thinking"] is False


def test_what_is_required_is_a_grammar(hermes: Daemon) -> None:
    hermes.say(HERMES_PING)

    def constraint(**fields: Any) -> Any:
        hermes.create(**fields)
        return hermes.engine.submitted.get().constraint

    hermes.engine.submitted.queue.clear()
    assert constraint() is None
    assert constraint(tool_choice="none") is None
    required = constraint(tool_choice="required")
    assert required.grammar.kind is GrammarKind.LARK
    assert "get_weather" in required.grammar.text
    assert "ping" in required.grammar.text
    named = {"type": "function", "function": {"name": "ping"}}
    one = constraint(tool_choice=named, parallel_tool_calls=False)
    assert "get_weather" not in one.grammar.text
    assert ")*" in required.grammar.text
    assert ")*" not in one.grammar.text
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
    structured = constraint(response_format=schema)
    assert structured.grammar.text == '{"type": "object"}'
    assert bytes(structured.thinking.begin) == b"<think>"
    assert bytes(structured.thinking.end) == b"</think>"


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_tools_that_are_allowed_are_all_that_is_called(hermes: Daemon) -> None:
    """The model is told of all, so that the prompt is the same from turn to turn."""
    hermes.say(HERMES_PING)
    hermes.engine.submitted.queue.clear()
    (choice,) = hermes.create(tool_choice=allowed("required", "ping")).choices
    assert calls_of(choice.message) == [NO_ARGUMENTS]
    assert hermes.given[1]["tools"] == TOOLS
    constraint = hermes.engine.submitted.get_nowait().constraint
    assert constraint is not None
    assert "ping" in constraint.grammar.text
    assert "get_weather" not in constraint.grammar.text
    hermes.say("No need.")
    (choice,) = hermes.create(tool_choice=allowed("auto", "ping", "get_weather")).choices
    assert choice.message.content == "No need."
    assert hermes.engine.submitted.get_nowait().constraint is None


@pytest.mark.parametrize("fields", [{}, {"content": None}, {"content": []}], ids=str)
def test_a_function_may_give_nothing_back(hermes: Daemon, fields: dict[str, Any]) -> None:
    hermes.say("Fine.")
    call = {"id": "c", "type": "function", "function": {"name": "ping", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "c", **fields}
    hermes.create(messages=[USER, {"role": "assistant", "tool_calls": [call]}, result])
    messages, _ = hermes.given
    assert (messages[2]["content"], messages[2]["name"]) == ("", "ping")


@pytest.mark.parametrize("parser", ["qwen3_coder", "gemma4", "lfm2"])
def test_what_is_no_schema_is_refused_where_a_grammar_is_made_of_it(parser: str) -> None:
    text = {"type": "string"}
    members = {"properties": {"key": text}}
    wrong = [
        {"properties": ["key"]},
        {**members, "required": True},
        {"required": [5]},
    ]
    if parser == "qwen3_coder":
        wrong.append({"properties": {"key": {**text, "pattern": 5}}})
    if parser == "gemma4":  # looks into them itself
        wrong += [
            {"properties": {"inner": {"type": "object", **members, "required": True}}},
            {"properties": {"key": {"anyOf": text}}},
            {"properties": {"key": {**text, "enum": 5}}},
        ]
    with Daemon.serving(tool_parser=parser) as made:
        for parameters in wrong:
            function = {"name": "f", "parameters": parameters, "strict": True}
            tool = {"type": "function", "function": function}
            with pytest.raises(openai.BadRequestError) as refused:
                made.create(tools=[tool], tool_choice="required")
            assert refused.value.param == "tools"
            assert made.create(tools=[tool]).choices
