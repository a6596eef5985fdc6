"""Chat completions, as OpenAI's client libraries send and read them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from load_tests.agents.dialects.dialect import Ask, CallParts, Json, Told, UserTurn
from load_tests.agents.recording import Answer, Tool


class ChatCompletions:
    """POST /v1/chat/completions."""

    name = "chat completions"
    path = "/chat/completions"

    def body(self, ask: Ask) -> Json:
        return {
            "model": ask.model,
            "messages": chat_messages(ask),
            "tools": [declared(tool) | {"function": _strict(tool)} for tool in ask.tools],
            "tool_choice": ask.choice,
            "parallel_tool_calls": False,
            "max_tokens": ask.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def reader(self) -> "ChatReader":
        return ChatReader()


def chat_messages(ask: Ask) -> list[Json]:
    """The conversation as messages, system prompt first."""
    messages: list[Json] = [{"role": "system", "content": ask.system}]
    for entry in ask.history:
        messages += _user(entry) if isinstance(entry, UserTurn) else [_assistant(entry)]
    return messages


def declared(tool: Tool) -> Json:
    """The tool as chat templates are given it."""
    return {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters,
        },
    }


def _strict(tool: Tool) -> Json:
    function: Json = declared(tool)["function"]
    return {**function, "strict": True}


def _user(turn: UserTurn) -> list[Json]:
    results: list[Json] = [
        {"role": "tool", "tool_call_id": id, "content": text} for id, text in turn.results
    ]
    return results + ([{"role": "user", "content": turn.text}] if turn.text else [])


def _assistant(answer: Answer) -> Json:
    message: Json = {"role": "assistant", "content": answer.text or None}
    if answer.calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in answer.calls
        ]
    return message


@dataclass(slots=True)
class ChatReader:
    """Deltas of one choice, then the usage."""

    text: str = ""
    calls: dict[int, CallParts] = field(default_factory=dict)
    usage: Json | None = None

    def hear(self, event: Mapping[str, Any]) -> None:
        self.usage = event.get("usage") or self.usage
        for choice in event["choices"]:
            self.text += choice["delta"].get("content") or ""
            for part in choice["delta"].get("tool_calls") or ():
                self._hear_call(part)

    def _hear_call(self, part: Mapping[str, Any]) -> None:
        function = part["function"]
        if part["index"] not in self.calls:
            self.calls[part["index"]] = CallParts(part["id"], function["name"])
        self.calls[part["index"]].arguments += function.get("arguments") or ""

    def told(self) -> Told:
        if self.usage is None:
            raise ValueError("the stream ended without usage")
        return Told(
            Answer(self.text, tuple(parts.call() for parts in self.calls.values())),
            prompt_tokens=self.usage["prompt_tokens"],
            cached_tokens=self.usage["prompt_tokens_details"]["cached_tokens"],
            output_tokens=self.usage["completion_tokens"],
        )
