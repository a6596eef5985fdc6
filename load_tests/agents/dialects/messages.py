"""Anthropic's Messages."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from load_tests.agents.dialects.dialect import Ask, CallParts, Json, Told, UserTurn
from load_tests.agents.recording import Answer

CHOICES = {"auto": "auto", "required": "any"}
PROMPT_COUNTS = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")


class Messages:
    """POST /v1/messages."""

    name = "Messages"
    path = "/messages"

    def body(self, ask: Ask) -> Json:
        return {
            "model": ask.model,
            "system": [{"type": "text", "text": ask.system}],
            "messages": [_message(entry) for entry in ask.history],
            "tools": [
                {
                    "name": tool.name,
                    "description": tool.description,
                    "input_schema": tool.parameters,
                    "strict": True,
                }
                for tool in ask.tools
            ],
            "tool_choice": {"type": CHOICES[ask.choice], "disable_parallel_tool_use": True},
            "max_tokens": ask.max_tokens,
            "temperature": 0,
            "stream": True,
        }

    def reader(self) -> "MessagesReader":
        return MessagesReader()


def _message(entry: UserTurn | Answer) -> Json:
    said: list[Json] = [{"type": "text", "text": entry.text}] if entry.text else []
    if isinstance(entry, UserTurn):
        results: list[Json] = [
            {"type": "tool_result", "tool_use_id": id, "content": text}
            for id, text in entry.results
        ]
        return {"role": "user", "content": results + said}
    uses: list[Json] = [
        {
            "type": "tool_use",
            "id": call.id,
            "name": call.name,
            "input": json.loads(call.arguments),
        }
        for call in entry.calls
    ]
    return {"role": "assistant", "content": said + uses}


@dataclass(slots=True)
class MessagesReader:
    """Blocks by index; the counts of the prompt come first, that of the answer last."""

    text: str = ""
    calls: dict[int, CallParts] = field(default_factory=dict)
    usage: Json = field(default_factory=dict)
    stopped: bool = False

    def hear(self, event: Mapping[str, Any]) -> None:
        match event["type"]:
            case "message_start":
                self.usage |= event["message"]["usage"]
            case "content_block_start":
                self._start(event["index"], event["content_block"])
            case "content_block_delta":
                self._add(event["index"], event["delta"])
            case "message_delta":
                self.usage |= _known(event["usage"])
            case "message_stop":
                self.stopped = True
            case "error":
                raise ValueError(f"error in the stream: {event['error']}")

    def _start(self, index: int, block: Mapping[str, Any]) -> None:
        if block["type"] == "tool_use":
            self.calls[index] = CallParts(block["id"], block["name"])

    def _add(self, index: int, delta: Mapping[str, Any]) -> None:
        if delta["type"] == "text_delta":
            self.text += delta["text"]
        elif delta["type"] == "input_json_delta":
            self.calls[index].arguments += delta["partial_json"]

    def told(self) -> Told:
        if not self.stopped:
            raise ValueError("the stream ended before message_stop")
        return Told(
            Answer(self.text, tuple(parts.call() for parts in self.calls.values())),
            prompt_tokens=sum(self.usage.get(count) or 0 for count in PROMPT_COUNTS),
            cached_tokens=self.usage.get("cache_read_input_tokens") or 0,
            output_tokens=self.usage["output_tokens"],
        )


def _known(usage: Mapping[str, Any]) -> Json:
    return {count: value for count, value in usage.items() if value is not None}
