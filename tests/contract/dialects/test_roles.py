"""A conversation that the template cannot render where its messages stand is served in every
dialect, and is the same prompt in each.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import httpx
import pytest

from engine.values.model import NO_REPLAYS, Replay
from tests.contract.scripted import Daemon, RecordingTokenizer

Said = tuple[str, str]

LATE: Sequence[Said] = (
    ("system", "First."),
    ("user", "Hi"),
    ("system", "Agents: none"),
    ("assistant", "Yes."),
    ("system", "Be quick."),
    ("user", "So?"),
)
RESULT: Sequence[Said] = (
    ("user", "Hi"),
    ("call", "look"),
    ("tool", "Rain."),
    ("user", "Go on."),
    ("user", "Now."),
)
TOOL = {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}}


class Strict(RecordingTokenizer):
    """Its template takes system messages at the head alone, and nothing but an answer after the
    result of a tool.
    """

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        replays: Mapping[int, Replay] = NO_REPLAYS,
        /,
        **arguments: object,
    ) -> list[int]:
        roles = [message["role"] for message in messages]
        if "system" in roles[1:] or ("tool", "user") in pairwise(roles):
            raise ValueError("the chat template refuses the messages")
        return super().apply_chat_template(messages, replays, **arguments)


def chat(conversation: Sequence[Said]) -> dict[str, Any]:
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    others: dict[str, dict[str, Any]] = {
        "call": {"role": "assistant", "content": None, "tool_calls": [call]},
        "tool": {"role": "tool", "tool_call_id": "a"},
    }
    messages = [
        {**others.get(role, {"role": role}), **({} if role == "call" else {"content": text})}
        for role, text in conversation
    ]
    return {"messages": messages, "tools": [{"type": "function", "function": TOOL}]}


def ollama(conversation: Sequence[Said]) -> dict[str, Any]:
    body = chat(conversation)
    for message in body["messages"]:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = {}
        if message["content"] is None:
            message["content"] = ""
    return {**body, "stream": False}


def messages(conversation: Sequence[Said]) -> dict[str, Any]:
    blocks = {
        "call": ("assistant", {"type": "tool_use", "id": "a", "name": "look", "input": {}}),
        "tool": ("user", {"type": "tool_result", "tool_use_id": "a", "content": "Rain."}),
    }
    sent = [
        {"role": blocks[role][0], "content": [blocks[role][1]]}
        if role in blocks
        else {"role": role, "content": text}
        for role, text in conversation
    ]
    schema = {"name": "look", "input_schema": TOOL["parameters"], "description": "Look."}
    return {"max_tokens": 9, "messages": sent, "tools": [schema]}


def responses(conversation: Sequence[Said]) -> dict[str, Any]:
    items = {
        "call": {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"},
        "tool": {"type": "function_call_output", "call_id": "a", "output": "Rain."},
    }
    sent = [items.get(role, {"role": role, "content": text}) for role, text in conversation]
    return {"input": sent, "tools": [{"type": "function", **TOOL}]}


BODIES = {
    "/v1/chat/completions": chat,
    "/v1/messages": messages,
    "/v1/responses": responses,
    "/api/chat": ollama,
}


@pytest.fixture(scope="module")
def strict() -> Iterator[Daemon]:
    with Daemon.serving(Strict()) as daemon:
        yield daemon


def given(daemon: Daemon, path: str, body: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """What the template has been given last, after a request that succeeds."""
    answer = httpx.post(f"{daemon.url}{path}", json={"model": "bytes", **body})
    assert answer.status_code == 200, answer.text
    tokenizer = daemon.engine.tokenizer
    assert isinstance(tokenizer, RecordingTokenizer)
    rendered, arguments = tokenizer.given[-1]
    return [(message["role"], message["content"]) for message in rendered], arguments


def reminder(text: str) -> str:
    return f"<system-reminder>\n{text}\n</system-reminder>"


@pytest.mark.parametrize("path", BODIES)
def test_later_system_messages_are_reminders(strict: Daemon, path: str) -> None:
    assert given(strict, path, BODIES[path](LATE))[0] == [
        ("system", "First."),
        ("user", f"Hi\n{reminder('Agents: none')}"),
        ("assistant", "Yes."),
        ("user", f"{reminder('Be quick.')}\nSo?"),
    ]


@pytest.mark.parametrize("path", BODIES)
def test_what_a_user_says_after_a_result_is_a_part_of_it(strict: Daemon, path: str) -> None:
    assert given(strict, path, BODIES[path](RESULT))[0][-1] == ("tool", "Rain.\nGo on.\nNow.")


def test_the_model_shows_what_its_template_takes(strict: Daemon) -> None:
    shown = httpx.get(f"{strict.url}/v1/models/bytes").json()["template_traits"]
    assert (shown["late_system"], shown["after_results"]) == ("user", "tool")
    assert (shown["system"], shown["call_ids"]) == ("system", "any")


def test_system_messages_at_the_head_are_one(strict: Daemon) -> None:
    body = chat([("system", "First."), ("developer", "Second."), ("user", "Hi")])
    rendered = given(strict, "/v1/chat/completions", body)[0]
    assert rendered == [("system", "First.\nSecond."), ("user", "Hi")]


@pytest.mark.parametrize(("effort", "told"), [("low", "low"), ("xhigh", "high"), ("max", "high")])
@pytest.mark.parametrize("path", [path for path in BODIES if path != "/api/chat"])
def test_efforts_that_no_template_knows_are_the_highest_that_they_do(
    strict: Daemon, path: str, effort: str, told: str
) -> None:
    fields: dict[str, dict[str, Any]] = {
        "/v1/messages": {"output_config": {"effort": effort}},
        "/v1/responses": {"reasoning": {"effort": effort}},
    }
    body = BODIES[path](RESULT[:1]) | fields.get(path, {"reasoning_effort": effort})
    assert given(strict, path, body)[1]["reasoning_effort"] == told


@pytest.mark.parametrize("path", BODIES)
def test_tools_whose_calls_could_not_be_told_apart_are_refused(strict: Daemon, path: str) -> None:
    """The same tool may come twice, as from two servers of an agent."""
    body = BODIES[path](RESULT[:1])
    (tool,) = body["tools"]
    given(strict, path, {**body, "tools": [tool, tool]})
    other = json.loads(json.dumps(tool).replace("Look.", "Look elsewhere."))
    answer = httpx.post(
        f"{strict.url}{path}", json={"model": "bytes", **body, "tools": [tool, other]}
    )
    assert answer.status_code == 400
    assert "two tools have the name 'look'" in answer.text


def test_namespaces_make_no_name_twice(strict: Daemon) -> None:
    plain = {"type": "function", "name": "a__look"}
    inside = {
        "type": "namespace",
        "name": "a",
        "description": "A.",
        "tools": [{**plain, "name": "look"}],
    }
    body = {"model": "bytes", "input": "Hi", "tools": [plain, inside]}
    answer = httpx.post(f"{strict.url}/v1/responses", json=body)
    assert answer.status_code == 400
    assert "two tools are called as 'a__look'" in answer.text
