"""How each dialect writes an image, and the place by which its errors name one."""

import base64
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

CHAT, MESSAGES, RESPONSES, OLLAMA = (
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/responses",
    "/api/chat",
)


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a dialect writes an image in a user's message and in a tool's result, and the place that
    its errors name.
    """

    path: str
    body: Callable[[str], dict[str, Any]]
    place: str
    nested: Callable[[str], dict[str, Any]]
    nested_place: str


CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def chat(data: str, *before: dict[str, Any], role: str = "user") -> dict[str, Any]:
    part = {"type": "image_url", "image_url": {"url": data}}
    said = {"role": role, "content": [part]} | ({"tool_call_id": "call_1"} if before else {})
    return {"messages": [*before, said], "max_tokens": 1}


def _chat_result(data: str) -> dict[str, Any]:
    user = {"role": "user", "content": "Look"}
    return chat(data, user, {"role": "assistant", "tool_calls": [CALL]}, role="tool")


def _block(data: str) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": data}
    return {"type": "image", "source": source}


def _messages(data: str) -> dict[str, Any]:
    return {"max_tokens": 1, "messages": [{"role": "user", "content": [_block(data)]}]}


def _messages_result(data: str) -> dict[str, Any]:
    call = {"type": "tool_use", "id": "call_1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": [_block(data)]}
    turns = ("user", "Look"), ("assistant", [call]), ("user", [result])
    messages = [{"role": role, "content": content} for role, content in turns]
    return {"max_tokens": 1, "messages": messages}


def _input_image(data: str) -> dict[str, Any]:
    return {"type": "input_image", "image_url": data}


def _responses(data: str) -> dict[str, Any]:
    said = {"role": "user", "content": [_input_image(data)]}
    return {"input": [said], "max_output_tokens": 1, "store": False}


def _responses_result(data: str) -> dict[str, Any]:
    call = {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "call_1", "output": [_input_image(data)]}
    said = [{"role": "user", "content": "Look"}, call, output]
    return {"input": said, "max_output_tokens": 1, "store": False}


def _ollama(data: str) -> dict[str, Any]:
    said = {"role": "user", "content": "", "images": [data]}
    return {"messages": [said], "stream": False, "options": {"num_predict": 1}}


def _ollama_result(data: str) -> dict[str, Any]:
    call = {"function": {"name": "look", "arguments": {}}}
    messages = [
        {"role": "user", "content": "Look"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "", "images": [data]},
    ]
    return {"messages": messages, "stream": False, "options": {"num_predict": 1}}


DIALECTS = (
    Dialect(CHAT, chat, "messages[0].content[0]", _chat_result, "messages[2].content[0]"),
    Dialect(
        MESSAGES,
        _messages,
        "messages[0].content[0].image",
        _messages_result,
        "messages[2].content[0].tool_result.content[0].image",
    ),
    Dialect(RESPONSES, _responses, "input[0].content[0]", _responses_result, "input[2].output[0]"),
    Dialect(OLLAMA, _ollama, "messages[0].images[0]", _ollama_result, "messages[2].images[0]"),
)


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def refusal(answer: httpx.Response, place: str) -> str:
    """The words of a 400 that names the place of an image."""
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    said = str(error if isinstance(error, str) else error["message"])
    assert said.startswith(f"{place}: "), said
    return said
