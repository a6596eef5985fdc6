"""Tools over a real socket: a scripted engine says what models of each family say, and the openai
client gets calls."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import httpx
import openai
import pytest

from engine.values.model import NO_REPLAYS, Replay
from engine.values.request import GrammarKind
from server.parsing.registry import TOOL_FORMATS
from server.parsing.schemas import MAX_REFERENCE_STEPS
from server.settings import Settings
from tests.contract.conftest import StrictClient, strict_client
from tests.contract.daemon import running
from tests.contract.fake_engine import ByteTokenizer, FakeEngine, Script

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
PING = {"type": "function", "function": {"name": "ping"}}
TOOLS = [WEATHER, PING]
USER = {"role": "user", "content": "How is the weather?"}
CALL = ("get_weather", {"city": 'Köln <&> "x"', "days": 3})
NO_ARGUMENTS: tuple[str, dict[str, Any]] = ("ping", {})
ARGUMENTS = json.dumps(CALL[1], ensure_ascii=False)

THINK = "<think> and </think>, <tool_call> "
"""A chat template's words, by which the server knows a model's formats."""

RECORDED = {
    "hermes": [
        f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>',
        '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>',
    ],
    "llama3_json": [
        f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}; ',
        '{"name": "ping", "parameters": {}}',
    ],
    "mistral": [
        f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {ARGUMENTS}}}, ',
        '{"name": "ping", "arguments": {}}]',
    ],
    "mistral_args": [
        f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}",
        "[TOOL_CALLS]ping[ARGS]{}",
    ],
    "kimi_k2": [
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        f"<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|>",
        "<|tool_call_begin|>functions.ping:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
    ],
    "deepseek_v3": [
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
        f"```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜>\n",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>ping\n```json\n{}\n```<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
    ],
    "deepseek_v31": [
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{ARGUMENTS}"
        "<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>ping<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ],
    "deepseek_v32": [
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">Köln <&> "x"</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n",
        '<｜DSML｜invoke name="ping">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    ],
    "qwen3_coder": [
        '<tool_call>\n<function=get_weather>\n<parameter=city>\nKöln <&> "x"\n</parameter>\n'
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n",
        "<tool_call>\n<function=ping>\n</function>\n</tool_call>",
    ],
    "glm45": [
        '<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Köln <&> "x"</arg_value>\n'
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n",
        "<tool_call>ping\n</tool_call>",
    ],
    "openai": [
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        f"{ARGUMENTS}<|call|>",
        "<|start|>assistant<|channel|>commentary to=functions.ping <|constrain|>json<|message|>{}",
    ],
    "lfm2": [
        '<|tool_call_start|>[get_weather(city="Köln <&> \\"x\\"", days=3), ',
        "ping()]<|tool_call_end|>",
    ],
    "gemma4": [
        '<|tool_call>call:get_weather{city:<|"|>Köln <&> "x"<|"|>,days:3}<tool_call|>',
        "<|tool_call>call:ping{}<tool_call|>",
    ],
}
"""The two calls as families write them."""


@dataclass(frozen=True)
class RecordingTokenizer(ByteTokenizer):
    """Keeps what the chat template was given."""

    given: list[tuple[Sequence[Mapping[str, Any]], dict[str, Any]]] = field(default_factory=list)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        replays: Mapping[int, Replay] = NO_REPLAYS,
        /,
        **template_arguments: object,
    ) -> list[int]:
        self.given.append((messages, template_arguments))
        return super().apply_chat_template(messages)


@dataclass(frozen=True)
class OpeningTokenizer(RecordingTokenizer):
    """Its template begins the assistant's reasoning."""

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        replays: Mapping[int, Replay] = NO_REPLAYS,
        /,
        **template_arguments: object,
    ) -> list[int]:
        ids = super().apply_chat_template(messages, **template_arguments)
        return [*ids, *b"<think>\n"]


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


@dataclass
class Daemon:
    engine: FakeEngine
    url: str
    client: StrictClient

    @property
    def given(self) -> tuple[Sequence[Mapping[str, Any]], dict[str, Any]]:
        """What the template was given last."""
        assert isinstance(self.engine.tokenizer, RecordingTokenizer)
        return self.engine.tokenizer.given[-1]

    def say(self, *answers: str) -> None:
        self.engine.script = Script(answers=answers)

    def create(self, **fields: Any) -> Any:
        return self.client.chat.completions.create(
            **{"model": "bytes", "messages": [USER], "tools": TOOLS, "max_tokens": 450} | fields
        )


@contextmanager
def daemon(
    tokenizer: type[RecordingTokenizer] = RecordingTokenizer, **settings: Any
) -> Iterator[Daemon]:
    engine = FakeEngine(tokenizer=tokenizer(chat_template=THINK))
    settings |= {"port": 0, "served_model_name": ("bytes",)}
    with running(engine, Settings(**settings)) as url, strict_client(url) as client:
        yield Daemon(engine, url, client)


@pytest.fixture(scope="module", params=sorted(RECORDED))
def family(
    request: pytest.FixtureRequest, no_settings_from_outside: None
) -> Iterator[tuple[str, Daemon]]:
    with daemon(tool_parser=request.param) as made:
        yield request.param, made


@pytest.fixture(scope="module")
def hermes(no_settings_from_outside: None) -> Iterator[Daemon]:
    """A model that reasons and writes its calls as Hermes does, told from its template."""
    with daemon(tool_parser="hermes") as made:
        yield made


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [
        (call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls
    ]


def test_every_family_is_known() -> None:
    assert RECORDED.keys() <= TOOL_FORMATS.keys()


def test_recorded_calls_reach_the_client(family: tuple[str, Daemon]) -> None:
    name, daemon = family
    daemon.say("".join(RECORDED[name]))
    (choice,) = daemon.create().choices
    assert calls_of(choice.message) == [CALL, NO_ARGUMENTS]
    assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    assert len({call.id for call in choice.message.tool_calls}) == 2


def test_recorded_calls_are_streamed(family: tuple[str, Daemon]) -> None:
    """Id and name first, then slices; no markup in what the user sees."""
    name, daemon = family
    daemon.say("".join(RECORDED[name]))
    names: dict[int, str] = {}
    arguments: dict[int, list[str]] = {}
    chunks = list(daemon.create(stream=True))
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
    assert counts[0] == counts[1] > 0


def test_content_reasoning_and_calls_of_one_answer(hermes: Daemon) -> None:
    hermes.say("<think>\nHm, <tool_call>?\n</think>\n\nLet me see.\n" + RECORDED["hermes"][0])
    completion = hermes.create()
    message = completion.choices[0].message
    assert message.content == "Let me see."
    assert message.reasoning_content == message.reasoning == "Hm, <tool_call>?"
    assert calls_of(message) == [CALL]
    details = completion.usage.completion_tokens_details
    assert 16 <= details.reasoning_tokens <= 32
    deltas = [chunk.choices[0].delta for chunk in hermes.create(stream=True)]
    assert "".join(delta.content or "" for delta in deltas) == "Let me see."
    thoughts = [(delta.model_extra or {}).get("reasoning_content") or "" for delta in deltas]
    assert "".join(thoughts) == "Hm, <tool_call>?"


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_that_the_template_has_begun(stream: bool) -> None:
    with daemon(OpeningTokenizer, tool_parser="hermes") as opened:
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
    hermes.say(RECORDED["hermes"][1])
    without: tuple[dict[str, Any], ...] = ({"tools": []}, {"tool_choice": "none"})
    for fields in without:
        (choice,) = hermes.create(**fields).choices
        assert choice.message.content == RECORDED["hermes"][1]
        assert choice.finish_reason == "stop"
        _, arguments = hermes.given
        assert "tools" not in arguments


def test_a_call_that_is_cut_off_ends_by_length(hermes: Daemon) -> None:
    hermes.say(RECORDED["hermes"][0])
    (choice,) = hermes.create(max_tokens=60).choices
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.name == "get_weather"


def test_every_choice_has_calls_of_its_own(hermes: Daemon) -> None:
    hermes.say(RECORDED["hermes"][0], "No need.", RECORDED["hermes"][1])
    one, two, three = hermes.create(n=3).choices
    assert calls_of(one.message) == [CALL]
    assert two.message.content == "No need."
    assert calls_of(three.message) == [NO_ARGUMENTS]
    reasons = [choice.finish_reason for choice in (one, two, three)]
    assert reasons == ["tool_calls", "stop", "tool_calls"]


def test_logprobs_stand_beside_calls(hermes: Daemon) -> None:
    hermes.say(RECORDED["hermes"][1])
    whole = hermes.create(logprobs=True).choices[0].logprobs.content
    streamed = [
        entry
        for chunk in hermes.create(logprobs=True, stream=True)
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert len(whole) == len(RECORDED["hermes"][1])
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
    with daemon(TextualTokenizer, tool_parser="deepseek_v31") as textual:
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
    hermes.say(RECORDED["hermes"][1])

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
    hermes.say(RECORDED["hermes"][1])
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


def test_the_models_say_what_the_server_knows(hermes: Daemon) -> None:
    """A format of calls that is named and unknown is refused at start."""
    with pytest.raises(ValueError, match="tool_parser"):
        Settings(tool_parser="nonsense")
    answer = httpx.get(f"{hermes.url}/v1/models")
    assert answer.status_code == 200


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
    with daemon(tool_parser=parser) as made:
        for parameters in wrong:
            function = {"name": "f", "parameters": parameters, "strict": True}
            tool = {"type": "function", "function": function}
            with pytest.raises(openai.BadRequestError) as refused:
                made.create(tools=[tool], tool_choice="required")
            assert refused.value.param == "tools"
            assert made.create(tools=[tool]).choices
