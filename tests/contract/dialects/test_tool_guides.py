"""Calls of the embedded model in each dialect: what it would write against a schema is not sampled,
once a call has begun, and a schema for the answer leaves it its tools.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import httpx
import jsonschema
import pytest

from engine.values.settings import EngineConfig
from server.settings import Settings
from tests.contract.daemon import running
from tests.contract.dialects.adapters import Chat, Dialect, Ollama, Responses
from tests.hosting import loaded

pytestmark = pytest.mark.process

QUESTION = "Get the weather in Paris."
DESCRIPTION = "Get the current weather."
MARKER = "1022"
"""The token <tool_call> of the embedded model."""


def parameters(**city: Any) -> dict[str, Any]:
    members = {"city": {"type": "string", **city}}
    return {"type": "object", "properties": members, "required": ["city"]}


def function(name: str = "get_weather", **city: Any) -> dict[str, Any]:
    return {"name": name, "description": DESCRIPTION, "parameters": parameters(**city)}


@contextmanager
def daemon(**settings: Any) -> Iterator[httpx.Client]:
    engine = loaded(EngineConfig(model="", kv_cache_bytes=16 << 20))
    with (
        running(engine, Settings(port=0, **settings)) as url,
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        yield http


@pytest.fixture(scope="module")
def http(demo_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=demo_url, timeout=60) as made:
        yield made


@pytest.fixture(scope="module")
def strict_only(no_settings_from_outside: None) -> Iterator[httpx.Client]:
    with daemon(tool_guides="strict-only") as made:
        yield made


def lenient(dialect: Dialect, function: dict[str, Any]) -> dict[str, Any]:
    """Responses are strict where the client says nothing."""
    return function | ({"strict": False} if isinstance(dialect, Responses) else {})


def calls(
    dialect: Dialect,
    http: httpx.Client,
    *,
    stream: bool = False,
    more: Mapping[str, Any] = MappingProxyType({}),
    **question: Any,
) -> list[tuple[str, Any]]:
    """The names and arguments of an answer's calls."""
    asked = {"text": QUESTION, "max_tokens": 200, "temperature": 0, **question}
    found = dialect.read(dialect.post(http, stream=stream, more=more, **asked)).calls
    return [(name, json.loads(arguments)) for name, arguments in found]


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_arguments_follow_their_schema_once_a_call_has_begun(
    http: httpx.Client, strict_only: httpx.Client, calling: Dialect, stream: bool
) -> None:
    asked: dict[str, Any] = {
        "stream": stream,
        "functions": [lenient(calling, function(pattern="^R"))],
    }
    ((name, arguments),) = calls(calling, http, **asked)
    assert name == "get_weather"
    assert arguments["city"].startswith("R")
    old = calls(calling, strict_only, **asked)
    assert old == [("get_weather", {"city": "Paris"})]


@pytest.mark.parametrize("stream", [False, True])
def test_what_begins_as_a_call_becomes_one_of_what_is_offered(
    http: httpx.Client, strict_only: httpx.Client, stream: bool
) -> None:
    """The marker comes by force wherever it may, to a question that asks for no call."""
    forced: dict[str, Any] = {"more": {"logit_bias": {MARKER: 100}}, "max_tokens": 45}
    asked: dict[str, Any] = {
        "text": "Who are you?",
        "functions": [function(enum=["Rome"])],
        "stream": stream,
    }
    found = calls(Chat(), http, **asked, **forced)
    assert found == [("get_weather", {"city": "Rome"})] * 2
    assert calls(Chat(), strict_only, **asked, **forced) == []


def test_a_schema_that_no_grammar_can_be_made_of_fails_no_request(
    http: httpx.Client, calling: Dialect
) -> None:
    """The function's name and those of its parameters still hold."""
    functions = [lenient(calling, function(pattern="[A-Z"))]
    ((name, arguments),) = calls(calling, http, functions=functions)
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
    answer = http.post("/v1/responses", json={"input": QUESTION, "tools": tools})
    if strict.get("strict"):
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
        return
    assert answer.status_code == 200, answer.text
    outer, namespace = answer.json()["tools"]
    assert outer["strict"] is namespace["tools"][0]["strict"] is False


def test_a_strict_function_is_held_to_its_schema_or_refused(strict_only: httpx.Client) -> None:
    for pattern, status in (("[A-Z", 400), ("^R", 200)):
        functions = [function(pattern=pattern) | {"strict": True}]
        answer = Chat().post(strict_only, text=QUESTION, max_tokens=1, functions=functions)
        assert answer.status_code == status
        if status == 400:
            assert answer.json()["error"]["param"] == "tools"


COLOR = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "blue"]}, "sure": {"type": "boolean"}},
    "required": ["color", "sure"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("strict", [False, True])
def test_a_schema_for_the_answer_leaves_the_model_its_tools(
    http: httpx.Client, calling: Dialect, strict: bool
) -> None:
    """Coding agents send both. An answer without calls conforms to the schema."""
    strictness = {} if isinstance(calling, Ollama) else {"strict": strict}
    asked: dict[str, Any] = {"functions": [function() | strictness], "schema": COLOR}
    assert calls(calling, http, **asked) == [("get_weather", {"city": "Paris"})]
    question = {"text": "Pick one: red, blue", "max_tokens": 200, **asked}
    said = calling.read(calling.post(http, temperature=0, **question))
    jsonschema.validate(json.loads(said.text), COLOR)
    assert not said.calls


SCHEMA = {"type": "object", "properties": {"sure": {"type": "boolean"}}}
NAMED = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
CHAT = {"messages": [{"role": "user", "content": "JSON?"}]}


def answers(http: httpx.Client, path: str, body: dict[str, Any]) -> list[Any]:
    """Choices that are drawn nearly by chance."""
    chance = {"temperature": 2, "max_tokens": 60, **body}
    found = (http.post(path, json={**chance, "seed": seed}) for seed in range(8))
    return [answer.raise_for_status().json()["choices"][0] for answer in found]


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
