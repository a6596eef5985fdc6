"""Tools beside a schema for the answer, as coding agents ask for both: in each dialect the embedded
model calls where it is asked to, and what it says elsewhere conforms."""

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import httpx
import pytest

pytestmark = pytest.mark.process

CALLING, SPEAKING = "Get the weather in Paris.", "Pick one: red, blue"
DESCRIPTION = "Get the current weather."
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
FUNCTION = {"name": "get_weather", "description": DESCRIPTION, "parameters": PARAMETERS}
SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "blue"]}, "sure": {"type": "boolean"}},
    "required": ["color", "sure"],
    "additionalProperties": False,
}

Post = Callable[[str, dict[str, Any]], Any]


class Answer(NamedTuple):
    text: str
    calls: list[tuple[str, Any]]


Ask = Callable[[Post, str, bool], Answer]
"""A question, with a tool that is strict or not and a schema for the answer."""


@pytest.fixture(scope="module")
def post(demo_url: str) -> Iterator[Post]:
    with httpx.Client(base_url=demo_url, timeout=60) as http:

        def posted(path: str, body: dict[str, Any]) -> Any:
            answer = http.post(path, json={"temperature": 0, **body})
            assert answer.status_code == 200, answer.text
            return answer.json()

        yield posted


def chat(post: Post, question: str, strict: bool) -> Answer:
    format = {"type": "json_schema", "json_schema": {"name": "color", "schema": SCHEMA}}
    body = {
        "tools": [{"type": "function", "function": {**FUNCTION, "strict": strict}}],
        "response_format": format,
        "messages": [{"role": "user", "content": question}],
    }
    (choice,) = post("/v1/chat/completions", body)["choices"]
    said = choice["message"]
    called = [call["function"] for call in said.get("tool_calls") or ()]
    assert choice["finish_reason"] == ("tool_calls" if called else "stop")
    calls = [(call["name"], json.loads(call["arguments"])) for call in called]
    return Answer(said["content"] or "", calls)


def responses(post: Post, question: str, strict: bool) -> Answer:
    body = {
        "tools": [{"type": "function", **FUNCTION, "strict": strict}],
        "text": {"format": {"type": "json_schema", "name": "color", "schema": SCHEMA}},
        "input": question,
    }
    items = post("/v1/responses", body)["output"]
    called = [item for item in items if item["type"] == "function_call"]
    said = [item for item in items if item["type"] == "message"]
    calls = [(call["name"], json.loads(call["arguments"])) for call in called]
    return Answer("".join(message["content"][0]["text"] for message in said), calls)


def messages(post: Post, question: str, strict: bool) -> Answer:
    tool = {"name": "get_weather", "description": DESCRIPTION, "input_schema": PARAMETERS}
    body = {
        "tools": [{**tool, "strict": strict}],
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 200,
    }
    blocks = post("/v1/messages", body)["content"]
    calls = [(one["name"], one["input"]) for one in blocks if one["type"] == "tool_use"]
    return Answer("".join(one["text"] for one in blocks if one["type"] == "text"), calls)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("ask", [chat, responses, messages])
def test_a_schema_for_the_answer_leaves_the_model_its_tools(
    post: Post, ask: Ask, strict: bool
) -> None:
    assert ask(post, CALLING, strict) == Answer("", [("get_weather", {"city": "Paris"})])
    text, calls = ask(post, SPEAKING, strict)
    value = json.loads(text)
    assert set(value) == {"color", "sure"}
    assert value["color"] in {"red", "blue"}
    assert isinstance(value["sure"], bool)
    assert not calls
