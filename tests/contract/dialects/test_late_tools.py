"""Tools that a conversation comes to know, and turns that leave tools out, keep the prefix cached:
each dialect as its agents send it.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import httpx
import pytest

from tests.contract.dialects.conftest import STREAMS
from tests.contract.metrics import value

pytestmark = pytest.mark.process

Json = dict[str, Any]
RULES = "Answer in one line. Nobody has read this rule before, and it is long. " * 14
SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}}}
SEARCH = {"name": "search_tools", "description": "Find tools.", "parameters": SCHEMA}
OTHER = {"name": "zoo", "description": "Ask the zoo.", "parameters": SCHEMA}
FETCHED = {"name": "archive", "description": "Ask the archive.", "parameters": SCHEMA}
FOUND = "archive"
CALL_ID = "toolu_1"
LAST_WORDS = (("user", "Thank you."), ("assistant", "You are welcome."), ("user", "Sum it up."))
"""What follows the search: the text of the last turn is asked with and without its tools."""


def function_tools(*functions: Json) -> list[Json]:
    return [{"type": "function", "function": each} for each in functions]


def chat(salt: str, turn: int) -> Json:
    """The tools of a later turn are sorted, so that the one that was found is the first."""
    call = {"name": "search_tools", "arguments": '{"q": "archive"}'}
    calls = [{"id": CALL_ID, "type": "function", "function": call}]
    head: list[Json] = [
        {"role": "system", "content": salt + RULES},
        {"role": "user", "content": "Go on."},
    ]
    found: list[Json] = [
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": CALL_ID, "content": FOUND},
    ]
    rest = [{"role": role, "content": text} for role, text in LAST_WORDS]
    tools = function_tools(*([SEARCH, OTHER] if turn == 0 else [FETCHED, SEARCH, OTHER]))
    return {"messages": until(turn, head, found, rest), "tools": tools, "max_tokens": 1}


def ollama(salt: str, turn: int) -> Json:
    body = chat(salt, turn)
    for message in body["messages"]:
        for each in message.get("tool_calls", ()):
            each["function"]["arguments"] = {"q": "archive"}
    return {
        "messages": body["messages"],
        "tools": body["tools"],
        "options": {"num_predict": 1},
        "stream": False,
    }


def messages(salt: str, turn: int) -> Json:
    call = {"type": "tool_use", "id": CALL_ID, "name": "search_tools", "input": {"q": "archive"}}
    reference = {"type": "tool_reference", "tool_name": FETCHED["name"]}
    result = {"type": "tool_result", "tool_use_id": CALL_ID, "content": [reference]}
    head = [{"role": "user", "content": "Go on."}]
    found = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    rest = [{"role": role, "content": text} for role, text in LAST_WORDS]
    tools: list[Json] = [
        {"name": each["name"], "description": each["description"], "input_schema": SCHEMA}
        for each in (FETCHED, SEARCH, OTHER)
    ]
    tools[0] |= {"defer_loading": True}
    conversation = until(turn, head, found, rest)
    return {
        "system": salt + RULES,
        "messages": conversation,
        "tools": tools,
        "max_tokens": 1,
    }


def responses(salt: str, turn: int) -> Json:
    call = {"type": "tool_search_call", "call_id": CALL_ID, "execution": "client"}
    output = {"type": "tool_search_output", "call_id": CALL_ID, "execution": "client"}
    found: list[Json] = [
        {**call, "status": "completed", "arguments": {"q": "archive"}},
        {**output, "status": "completed", "tools": [{"type": "function", **FETCHED}]},
    ]
    head = [{"role": "user", "content": "Go on."}]
    rest = [{"role": role, "content": text} for role, text in LAST_WORDS]
    search = {"type": "tool_search", "execution": "client", "description": "Find tools."}
    tools = [search | {"parameters": SCHEMA}, {"type": "function", **OTHER}]
    return {
        "instructions": salt + RULES,
        "input": until(turn, head, found, rest),
        "tools": tools,
        "max_output_tokens": 1,
    }


def until(turn: int, head: list[Json], found: list[Json], rest: list[Json]) -> list[Json]:
    """The first turn, the one after the search, and the one after that."""
    return [head, head + found, head + found + rest][turn]


def without_tools(path: str, body: Json) -> Json:
    """The turn as Codex asks for a summary."""
    return body | {"tools": []}


def forbidding(path: str, body: Json) -> Json:
    """The turn as clients send it who forbid calls."""
    none: object = {"type": "none"} if path == "/v1/messages" else "none"
    return body | {"tool_choice": none}


BODIES: Mapping[str, Callable[[str, int], Json]] = {
    "/v1/chat/completions": chat,
    "/v1/messages": messages,
    "/v1/responses": responses,
    "/api/chat": ollama,
}


@pytest.fixture(scope="module")
def http(demo_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=demo_url, timeout=60) as client:
        yield client


def counted(http: httpx.Client, source: str) -> float:
    """Prompt tokens of the daemon so far that were cached, or computed."""
    return value(http.get("/metrics").text, "rootstock_prompt_tokens_total", source=source)


def ask(http: httpx.Client, path: str, body: Json, stream: bool) -> tuple[float, float]:
    """The cached tokens of the prompt, and all of them."""
    before = [counted(http, source) for source in ("cached", "computed")]
    answer = http.post(path, json={"model": "", **body, "stream": stream})
    assert answer.status_code == 200, answer.text
    cached, computed = (
        counted(http, source) - known
        for source, known in zip(("cached", "computed"), before, strict=True)
    )
    return cached, cached + computed


@STREAMS
@pytest.mark.parametrize("path", BODIES)
def test_a_tool_that_was_searched_for_leaves_the_prompt_cached(
    http: httpx.Client, path: str, stream: bool
) -> None:
    body, salt = BODIES[path], f"{path} {stream}. "
    cached, first = ask(http, path, body(salt, 0), stream)
    assert cached < 0.5 * first
    cached, searched = ask(http, path, body(salt, 1), stream)
    assert cached >= 0.95 * first
    cached, resumed = ask(http, path, body(salt, 2), stream)
    assert searched < resumed
    assert cached >= 0.95 * resumed


@STREAMS
@pytest.mark.parametrize(
    ("path", "leave_out"),
    [
        (path, leave_out)
        for path in BODIES
        for leave_out in (without_tools, forbidding)
        if (path, leave_out) != ("/api/chat", forbidding)  # which has no tool_choice
    ],
)
def test_a_turn_that_calls_nothing_leaves_the_prompt_cached(
    http: httpx.Client, path: str, stream: bool, leave_out: Callable[[str, Json], Json]
) -> None:
    """As agents ask for a summary: after calls, the tools stay in the prompt."""
    body, salt = BODIES[path], f"{path} {stream} {leave_out.__name__}. "
    ask(http, path, body(salt, 0), stream)
    ask(http, path, body(salt, 1), stream)
    cached, summed_up = ask(http, path, leave_out(path, body(salt, 2)), stream)
    assert cached >= 0.95 * summed_up
