"""Refusals and failures, in Anthropic's object everywhere under /v1/messages."""

from collections.abc import AsyncGenerator, Iterator, Set
from contextlib import aclosing, contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any

import anthropic
import httpx
import pytest

from engine.api import InvalidRequest
from engine.values.output import OutputEvent
from engine.values.request import Request
from tests.contract.fake_engine import FakeEngine, Gate
from tests.contract.messages.scripted import MessagesDaemon
from tests.contract.scripted import USER


def message_of(answer: httpx.Response, kind: str = "invalid_request_error") -> str:
    body = answer.json()
    assert set(body) == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert set(body["error"]) == {"type", "message"}
    assert body["error"]["type"] == kind
    assert answer.headers["request-id"] == answer.headers["x-request-id"] == body["request_id"]
    return str(body["error"]["message"])


def user(*blocks: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": list(blocks)}]


def text(words: str = "Hi") -> dict[str, object]:
    return {"type": "text", "text": words}


def result(*blocks: object) -> dict[str, object]:
    return {"type": "tool_result", "tool_use_id": "a", "content": list(blocks)}


def call(**fields: object) -> dict[str, object]:
    return {"type": "tool_use", "id": "a", "name": "f", "input": {}} | fields


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
PDF = {
    "type": "document",
    "source": {"type": "base64", "media_type": "application/pdf", "data": ""},
}
UNTOLD = {"type": "document", "source": {"type": "text", "media_type": "text/plain"}}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
ASSISTANTS_CALL = {"role": "assistant", "content": [call()]}

BAD = [
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [USER] * 10_001}, "messages"),
    ({"messages": user(*[text()] * 1001)}, "messages[0].content"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": user({"type": "text"})}, "messages[0].content[0].text.text"),
    ({"messages": user({"text": "Hi"})}, "messages[0].content[0]"),
    ({"messages": user({"kind": "container_upload"})}, "messages[0].content[0]"),
    (
        {"messages": user({"type": "search_result", "title": "a", "content": []})},
        "messages[0].content[0].search_result.source",
    ),
    (
        {"messages": user({"type": "document", "source": {"type": "content", "content": [IMAGE]}})},
        "messages[0].content[0].document.source.content.content[0].image",
    ),
    ({"messages": user(text(), IMAGE)}, "messages[0].content[1].image"),
    ({"messages": user(PDF)}, "messages[0].content[0].document"),
    ({"messages": user({"type": "document"})}, "messages[0].content[0].document.source"),
    ({"messages": user(UNTOLD)}, "messages[0].content[0].document.source.text.data"),
    (
        {"messages": user(result(text(), PDF))},
        "messages[0].content[0].tool_result.content[1].document",
    ),
    (
        {"messages": user(result(text(), IMAGE))},
        "messages[0].content[0].tool_result.content[1].image",
    ),
    ({"messages": user(call())}, "messages[0].content[0]"),
    ({"messages": [{"role": "assistant", "content": [result()]}]}, "messages[0].content[0]"),
    ({"messages": [USER, {"role": "system", "content": [call()]}]}, "messages[1].content[0]"),
    ({"messages": user({"type": "tool_result"})}, "messages[0].content[0].tool_result.tool_use_id"),
    (
        {"messages": [{"role": "assistant", "content": [call(input="{}")]}]},
        "messages[0].content[0].tool_use.input",
    ),
    ({"messages": [USER, ASSISTANTS_CALL]}, "messages"),
    (
        {"messages": [{"role": "assistant", "content": [call()] * 600}] * 2 + [USER]},
        "messages",
    ),
    ({"system": [IMAGE]}, "system[0].image"),
    ({"system": 5}, "system"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"temperature": "warm"}, "temperature"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"stop_sequences": ["a"] * 65}, "stop_sequences"),
    ({"stop_sequences": ["x" * 512] * 9}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences[0]"),
    ({"thinking": {"type": "often"}}, "thinking.type"),
    ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
    ({"output_config": {"effort": "some"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "json_object"}}}, "output_config.format.type"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({"tools": [TOOL] * 1025}, "tools"),
    ({"tools": [{"name": "f"}]}, "tools[0]"),
    ({"tools": [TOOL | {"name": "two words"}]}, "tools[0]"),
    ({"tools": [{"type": "bash_20250124", "name": "two words"}]}, "tools[0]"),
    ({"tools": [{"type": "function", "name": "f"}]}, "tools[0]"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "required"}}, "tool_choice.type"),
    ({"mcp_servers": [{"type": "url", "url": "https://example.com"}]}, "mcp_servers"),
    ({"priority": 1}, "priority"),
    ({"speculate": 1.5}, "speculate"),
    ({"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs"),
]


@pytest.mark.parametrize(("fields", "place"), BAD)
def test_what_is_invalid_is_refused_by_its_name(
    hermes: MessagesDaemon, fields: dict[str, Any], place: str
) -> None:
    answer = hermes.post(**fields)
    assert answer.status_code == 400
    assert message_of(answer).startswith(f"{place}: ")


def test_the_engines_refusals_have_anthropics_names(hermes: MessagesDaemon) -> None:
    refusals = {"stop": "stop_sequences", "thinking_budget": "thinking.budget_tokens"}
    for param, name in refusals.items():
        hermes.say("", refusal=InvalidRequest(f"{param}: no", param))
        assert message_of(hermes.post()) == f"{name}: no"


def test_a_prompt_that_is_too_long_has_the_words_that_make_clients_compact(
    hermes: MessagesDaemon,
) -> None:
    """Claude Code's own pattern."""
    words = [{"role": "user", "content": "x" * 600}]
    pattern = r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)"
    with pytest.raises(anthropic.BadRequestError, match=pattern):
        hermes.anthropic.messages.count_tokens(model="bytes", messages=words)


def test_an_unknown_path_is_not_found(hermes: MessagesDaemon) -> None:
    assert message_of(hermes.http.post("/v1/messages/nope"), "not_found_error")
    assert message_of(hermes.http.get("/v1/messages"), "invalid_request_error")


@contextmanager
def streamed(daemon: MessagesDaemon) -> Iterator[Iterator[str]]:
    """The names of a stream's events as they come."""
    body = {"messages": [USER], "max_tokens": 5, "stream": True}
    with daemon.http.stream("POST", "/v1/messages", json=body) as answer:
        lines = answer.iter_lines()
        yield (line.removeprefix("event: ") for line in lines if line.startswith("event: "))


class Queueing(FakeEngine):
    """Admits nobody before its gate is open."""

    async def _events(self, request: Request, live: Set[int]) -> AsyncGenerator[OutputEvent, None]:
        gate, self.script = self.script.gate, replace(self.script, gate=None)
        assert gate is not None
        await gate.passed()
        async with aclosing(super()._events(request, live)) as events:
            async for event in events:
                yield event


def test_who_waits_in_the_queue_is_pinged_before_the_message_begins() -> None:
    """Until then nobody knows what of the prompt is cached. Clients pass over pings."""
    with MessagesDaemon.serving(engine=Queueing, keepalive_seconds=0.01) as slow:
        slow.say("Hi", gate=(gate := Gate()))
        with streamed(slow) as events:
            assert list(islice(events, 2)) == ["ping", "ping"]
            gate.open()
            assert next(event for event in events if event != "ping") == "message_start"
        slow.say("Hi", gate=(gate := Gate()))
        with slow.stream(max_tokens=5) as stream:
            gate.open()
            assert stream.get_final_text() == "Hi"


@pytest.mark.parametrize("path", ["/v1/models/nope", "/v1/skills", "/v1/messages/nope"])
def test_clients_of_anthropic_read_its_errors_on_paths_of_nobody(
    hermes: MessagesDaemon, path: str
) -> None:
    versioned = hermes.http.get(path, headers={"anthropic-version": "2023-06-01"})
    body = versioned.json()
    assert versioned.status_code == 404
    assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")
    assert body["request_id"] == versioned.headers["x-request-id"]
    plain = hermes.http.get(path).json()
    assert ("type" in plain) == path.startswith("/v1/messages")


def test_openai_s_own_paths_keep_its_errors(hermes: MessagesDaemon) -> None:
    answer = hermes.http.post(
        "/v1/chat/completions",
        json={"messages": []},
        headers={"anthropic-version": "2023-06-01"},
    )
    assert (answer.status_code, set(answer.json())) == (400, {"error"})
