"""A history with reasoning, words and a call in one answer, as clients of each dialect bring it
back, on a model whose template takes one text before a call."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from engine.values.model import NO_REPLAYS
from tests.contract.scripted import TOOLS, USER, Daemon, RecordingTokenizer


class OneText(RecordingTokenizer):
    """Its template refuses content beside reasoning in an answer that calls, as gpt-oss's."""

    def apply_chat_template(
        self, messages: Any, replays: Any = NO_REPLAYS, /, **arguments: Any
    ) -> Any:
        super().apply_chat_template(messages, replays, **arguments)
        if any(m.get("tool_calls") and m["content"] and m.get("thinking") for m in messages):
            raise ValueError("the chat template refuses the messages: not both")
        said = [m | {"content": m["content"] or m.get("thinking")} for m in messages]
        return super().apply_chat_template(said, replays, **arguments)


@pytest.fixture(scope="module")
def strict(no_settings_from_outside: None) -> Iterator[Daemon]:
    with Daemon.serving(OneText()) as made:
        yield made


CHAT = {
    "messages": [
        USER,
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "ping", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "Rain."},
    ],
    "tools": TOOLS,
}
RESPONSES = {
    "input": [
        USER,
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm."}],
        },
        {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "a", "name": "ping", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "Rain."},
    ],
    "tools": [{"type": "function", "name": "ping"}],
}
MESSAGES = {
    "messages": [
        USER,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "a", "name": "ping", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "a", "content": "Rain."}],
        },
    ],
    "tools": [{"name": "ping", "input_schema": {"type": "object"}}],
    "max_tokens": 50,
}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/responses", RESPONSES),
        ("/v1/messages", MESSAGES),
        ("/v1/chat/completions/render", CHAT),
    ],
)
def test_all_of_an_answer_reaches_the_model(
    strict: Daemon, path: str, body: dict[str, Any]
) -> None:
    strict.say("Fine.")
    answer = httpx.post(strict.url + path, json={"model": "bytes", **body})
    assert answer.status_code == 200, answer.text
    (_, called, _), _ = strict.given
    assert called["content"] == called["thinking"] == "Hm.\n\nI look."
    assert called["tool_calls"][0]["function"]["name"] == "ping"
