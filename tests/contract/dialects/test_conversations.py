"""A conversation that makes no prompt is refused by the name that the client has for the field."""

from typing import Any

import httpx
import pytest

from tests.contract.scripted import USER, Daemon

LONG_NUMBER = '{"a": ' + "9" * 600 + "}"
FUNCTION = {"type": "function", "name": "look", "parameters": {"type": "object"}}
NAMED = {"type": "function", "name": "nobody"}
NAMESPACE = {"type": "namespace", "name": "n" * 200, "description": "N."}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "a", "function": {"name": "look", "arguments": LONG_NUMBER}}],
}
USED = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
TOOL = {"type": "function", "function": {"name": "look"}}

TOO_MANY_DIGITS = "what the arguments of all calls say has a number of too many digits"
NO_PREFILL = "the last message must be the assistant's, with text and without calls"

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("chat/completions", {"messages": [USER, CALLED]}, f"messages: {TOO_MANY_DIGITS}"),
    (
        "chat/completions",
        {"messages": [USER], "continue_final_message": True},
        f"continue_final_message: {NO_PREFILL}",
    ),
    (
        "chat/completions",
        {"messages": [USER], "tool_choice": "required"},
        "tool_choice: there are no tools to choose from",
    ),
    (
        "chat/completions",
        {
            "messages": [USER],
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "nobody"}},
        },
        "tool_choice: tools has no function 'nobody'",
    ),
    (
        "messages",
        {"messages": [USER, {"role": "assistant", "content": [USED]}], "max_tokens": 9},
        f"messages: {NO_PREFILL}",
    ),
    ("responses", {"input": []}, "input: there is nothing to answer"),
    (
        "responses",
        {
            "input": [
                {"type": "function_call", "call_id": "a", "name": "f", "arguments": LONG_NUMBER}
            ]
        },
        f"input: {TOO_MANY_DIGITS}",
    ),
    (
        "responses",
        {"input": "Hi", "tools": [FUNCTION], "tool_choice": NAMED},
        "tool_choice: tools has no function 'nobody'",
    ),
    (
        "responses",
        {"input": "Hi", "tools": [{**NAMESPACE, "tools": [{**FUNCTION, "name": "f" * 60}]}]},
        "tools: a name and its namespace have at most 256 characters",
    ),
]


@pytest.mark.parametrize(("path", "body", "problem"), REFUSED)
def test_errors_name_the_clients_field(
    shared_slow: Daemon, path: str, body: dict[str, Any], problem: str
) -> None:
    answer = httpx.post(f"{shared_slow.url}/v1/{path}", json={"model": "bytes", **body})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"].startswith(problem)
    assert error.get("param", problem.partition(":")[0]) == problem.partition(":")[0]
