"""Calls and answers with schemas, by the embedded model, in each dialect: what it would write
against a schema is not sampled, in calls that nobody has asked to be strict once they have begun.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import httpx
import jsonschema
import pytest

from engine.values.settings import EngineConfig
from server.settings import Settings
from tests.contract.daemon import running
from tests.hosting import loaded

pytestmark = pytest.mark.process

CALLING, SPEAKING = "Get the weather in Paris.", "Pick one: red, blue"
DESCRIPTION = "Get the current weather."
MARKER = "1022"
"""The token <tool_call> of the embedded model."""

COLOR = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "blue"]}, "sure": {"type": "boolean"}},
    "required": ["color", "sure"],
    "additionalProperties": False,
}
"""A schema for an answer."""


@dataclass
class Asked:
    """A question, with a tool of these parameters, and a schema for the answer perhaps."""

    parameters: dict[str, Any]
    question: str = CALLING
    stream: bool = False
    strict: bool = False
    answer: dict[str, Any] | None = None
    more: dict[str, Any] = field(default_factory=dict)


class Answer(NamedTuple):
    text: str
    calls: list[tuple[str, Any]]


Ask = Callable[[httpx.Client, Asked], Answer]
"""In one dialect."""


def parameters(**city: Any) -> dict[str, Any]:
    members = {"city": {"type": "string", **city}}
    return {"type": "object", "properties": members, "required": ["city"]}


@contextmanager
def daemon(**settings: Any) -> Iterator[httpx.Client]:
    engine = loaded(EngineConfig(model="", kv_cache_bytes=16 << 20))
    with (
        running(engine, Settings(port=0, **settings)) as url,
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        yield http


@pytest.fixture(scope="module")
def http(no_settings_from_outside: None) -> Iterator[httpx.Client]:
    with daemon() as made:
        yield made


@pytest.fixture(scope="module")
def strict_only(no_settings_from_outside: None) -> Iterator[httpx.Client]:
    with daemon(tool_guides="strict-only") as made:
        yield made


def posted(http: httpx.Client, path: str, body: dict[str, Any], stream: bool) -> list[Any]:
    """The answer's events, or all of it as one."""
    answer = http.post(path, json={"temperature": 0, "stream": stream, **body})
    assert answer.status_code == 200, answer.text
    if not stream:
        return [answer.json()]
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n") if "data: " in line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def chat(http: httpx.Client, asked: Asked) -> Answer:
    function = {
        "name": "get_weather",
        "description": DESCRIPTION,
        "parameters": asked.parameters,
        **({"strict": True} if asked.strict else {}),
    }
    body = {
        "tools": [{"type": "function", "function": function}],
        "messages": [{"role": "user", "content": asked.question}],
        **asked.more,
    }
    if asked.answer:
        named = {"name": "color", "schema": asked.answer}
        body["response_format"] = {"type": "json_schema", "json_schema": named}
    text, said = "", dict[int, tuple[str, str]]()
    for event in posted(http, "/v1/chat/completions", body, asked.stream):
        for choice in event["choices"]:
            message = choice.get("delta") or choice.get("message") or {}
            text += message.get("content") or ""
            for index, call in enumerate(message.get("tool_calls") or ()):
                name, arguments = said.get(at := call.get("index", index), ("", ""))
                function = call["function"]
                name += function.get("name") or ""
                said[at] = (name, arguments + (function.get("arguments") or ""))
    return Answer(text, [(name, json.loads(arguments)) for name, arguments in said.values()])


def responses(http: httpx.Client, asked: Asked) -> Answer:
    tool = {"name": "get_weather", "description": DESCRIPTION, "parameters": asked.parameters}
    tools = [{"type": "function", **tool, "strict": asked.strict}]
    body: dict[str, Any] = {"tools": tools, "input": asked.question}
    if asked.answer:
        body["text"] = {"format": {"type": "json_schema", "name": "color", "schema": asked.answer}}
    last = posted(http, "/v1/responses", body, asked.stream)[-1]
    items = (last["response"] if asked.stream else last)["output"]
    called = [item for item in items if item["type"] == "function_call"]
    said = [item["content"][0]["text"] for item in items if item["type"] == "message"]
    calls = [(call["name"], json.loads(call["arguments"])) for call in called]
    return Answer("".join(said), calls)


def messages(http: httpx.Client, asked: Asked) -> Answer:
    tool = {"name": "get_weather", "description": DESCRIPTION, "input_schema": asked.parameters}
    body: dict[str, Any] = {
        "tools": [{**tool, **({"strict": True} if asked.strict else {})}],
        "messages": [{"role": "user", "content": asked.question}],
        "max_tokens": 200,
    }
    if asked.answer:
        body["output_config"] = {"format": {"type": "json_schema", "schema": asked.answer}}
    events = posted(http, "/v1/messages", body, asked.stream)
    if not asked.stream:
        blocks = events[0]["content"]
        calls = [(one["name"], one["input"]) for one in blocks if one["type"] == "tool_use"]
        return Answer("".join(one["text"] for one in blocks if one["type"] == "text"), calls)
    begun = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    text = "".join(delta.get("text", "") for delta in deltas)
    json_text = "".join(delta.get("partial_json", "") for delta in deltas)
    called = [block["name"] for block in begun if block["type"] == "tool_use"]
    return Answer(text, [(name, json.loads(json_text)) for name in called])


ALL = pytest.mark.parametrize("ask", [chat, responses, messages])


@pytest.mark.parametrize("strict", [False, True])
@ALL
def test_a_schema_for_the_answer_leaves_the_model_its_tools(
    http: httpx.Client, ask: Ask, strict: bool
) -> None:
    """As coding agents ask for both. What the model says where it does not call conforms."""
    both = Asked(parameters(), strict=strict, answer=COLOR)
    assert ask(http, both) == Answer("", [("get_weather", {"city": "Paris"})])
    text, calls = ask(http, replace(both, question=SPEAKING))
    jsonschema.validate(json.loads(text), COLOR)
    assert not calls


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@ALL
def test_arguments_follow_their_schema_once_a_call_has_begun(
    http: httpx.Client, strict_only: httpx.Client, ask: Ask, stream: bool
) -> None:
    asked = Asked(parameters(pattern="^R"), stream=stream)
    ((name, arguments),) = ask(http, asked).calls
    assert name == "get_weather"
    assert arguments["city"].startswith("R")
    assert ask(strict_only, asked).calls == [("get_weather", {"city": "Paris"})]


@pytest.mark.parametrize("stream", [False, True])
def test_what_begins_as_a_call_becomes_one_of_what_is_offered(
    http: httpx.Client, strict_only: httpx.Client, stream: bool
) -> None:
    """The marker comes by force wherever it may, to a question that asks for no call."""
    forced = {"logit_bias": {MARKER: 100}, "max_tokens": 45}
    asked = Asked(parameters(enum=["Rome"]), "Who are you?", stream, more=forced)
    assert chat(http, asked).calls == [("get_weather", {"city": "Rome"})] * 2
    assert chat(strict_only, asked).calls == []


@ALL
def test_a_schema_that_no_grammar_can_be_made_of_fails_no_request(
    http: httpx.Client, ask: Ask
) -> None:
    """The function's name and those of its parameters still hold."""
    ((name, arguments),) = ask(http, Asked(parameters(pattern="[A-Z"))).calls
    assert name == "get_weather"
    assert set(arguments) == {"city"}


UNSATISFIABLE = {"minLength": 5, "maxLength": 2}
LONG_NAME = {"$ref": "#/$defs/a/x"}
"""A reference that no grammar can follow: its path is of three names."""


@pytest.mark.parametrize("city", [UNSATISFIABLE, LONG_NAME])
@pytest.mark.parametrize("strict", [{}, {"strict": None}, {"strict": True}])
def test_a_function_that_does_not_ask_to_be_strict_fails_no_response(
    http: httpx.Client, city: dict[str, Any], strict: dict[str, bool | None]
) -> None:
    """Its keywords are those that grammars know, so it is strict unless the grammar is refused."""
    schema = parameters(**city) | {"$defs": {"a/x": {"type": "string"}}}
    inner = {"type": "function", "name": "other", "parameters": {"type": "object"}}
    tools = [
        {"type": "function", "name": "f", "parameters": schema, **strict},
        {"type": "namespace", "name": "more", "tools": [inner]},
    ]
    answer = http.post("/v1/responses", json={"input": CALLING, "tools": tools})
    if strict.get("strict"):
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
        return
    assert answer.status_code == 200, answer.text
    outer, namespace = answer.json()["tools"]
    assert outer["strict"] is namespace["tools"][0]["strict"] is False


def test_a_strict_function_is_held_to_its_schema_or_refused(strict_only: httpx.Client) -> None:
    for schema, status in ((parameters(pattern="[A-Z"), 400), (parameters(pattern="^R"), 200)):
        function = {"name": "f", "parameters": schema, "strict": True}
        body: dict[str, Any] = {
            "tools": [{"type": "function", "function": function}],
            "messages": [{"role": "user", "content": CALLING}],
            "max_tokens": 1,
        }
        answer = strict_only.post("/v1/chat/completions", json=body)
        assert answer.status_code == status
        if status == 400:
            assert answer.json()["error"]["param"] == "tools"


SCHEMA = {"type": "object", "properties": {"sure": {"type": "boolean"}}}
NAMED = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
CHAT = {"messages": [{"role": "user", "content": "JSON?"}]}


def answers(http: httpx.Client, path: str, body: dict[str, Any]) -> list[Any]:
    """Choices that are drawn nearly by chance."""
    chance = {"temperature": 2, "max_tokens": 60, **body}
    return [
        posted(http, path, {**chance, "seed": seed}, False)[0]["choices"][0] for seed in range(8)
    ]


@pytest.mark.parametrize("asked", [{"response_format": NAMED}, {"guided_json": json.dumps(SCHEMA)}])
def test_an_answer_has_the_keys_of_its_schema_alone(
    http: httpx.Client, asked: dict[str, Any]
) -> None:
    """By chance it would have others, and go on until max_tokens."""
    said = [
        (choice["finish_reason"], choice["message"]["content"])
        for choice in answers(http, "/v1/chat/completions", {**CHAT, **asked})
    ] + [
        (choice["finish_reason"], choice["text"])
        for choice in answers(http, "/v1/completions", {"prompt": "JSON:", **asked})
    ]
    for reason, text in said:
        assert reason == "stop"
        assert set(json.loads(text)) <= {"sure"}


@pytest.mark.slow
def test_a_schema_may_be_kept_to_the_letter(no_settings_from_outside: None) -> None:
    with daemon(json_schemas="literal") as http:
        said = answers(http, "/v1/chat/completions", {**CHAT, "guided_json": SCHEMA})
    assert any(choice["finish_reason"] == "length" for choice in said)
