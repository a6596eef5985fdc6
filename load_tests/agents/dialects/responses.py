"""OpenAI's Responses, stateless: the whole conversation is sent as items, and nothing is stored."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from load_tests.agents.dialects.dialect import Ask, Json, Told, UserTurn
from load_tests.agents.recording import Answer, Call

ENDS = ("response.completed", "response.incomplete")


class Responses:
    """POST /v1/responses."""

    name = "Responses"
    path = "/responses"

    def body(self, ask: Ask) -> Json:
        return {
            "model": ask.model,
            "instructions": ask.system,
            "input": [item for entry in ask.history for item in _items(entry)],
            "tools": [
                {
                    "type": "function",
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.parameters,
                    "strict": True,
                }
                for tool in ask.tools
            ],
            "tool_choice": ask.choice,
            "parallel_tool_calls": False,
            "max_output_tokens": ask.max_tokens,
            "temperature": 0,
            "store": False,
            "stream": True,
        }

    def reader(self) -> "ResponsesReader":
        return ResponsesReader()


def _items(entry: UserTurn | Answer) -> list[Json]:
    if isinstance(entry, UserTurn):
        outputs: list[Json] = [
            {"type": "function_call_output", "call_id": id, "output": text}
            for id, text in entry.results
        ]
        return outputs + ([_message("user", "input_text", entry.text)] if entry.text else [])
    said = [_message("assistant", "output_text", entry.text)] if entry.text else []
    return said + [
        {
            "type": "function_call",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
        }
        for call in entry.calls
    ]


def _message(role: str, kind: str, text: str) -> Json:
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


@dataclass(slots=True)
class ResponsesReader:
    """Acts on whole items, as Codex does."""

    text: str = ""
    calls: list[Call] = field(default_factory=list)
    response: Json | None = None

    def hear(self, event: Mapping[str, Any]) -> None:
        if event["type"] == "response.output_item.done":
            self._hear_item(event["item"])
        elif event["type"] in ENDS:
            self.response = event["response"]
        elif event["type"] in {"response.failed", "error"}:
            raise ValueError(f"the response failed: {event}")

    def _hear_item(self, item: Mapping[str, Any]) -> None:
        if item["type"] == "function_call":
            self.calls.append(Call(item["call_id"], item["name"], item["arguments"]))
        elif item["type"] == "message":
            self.text += "".join(part["text"] for part in item["content"])

    def told(self) -> Told:
        if self.response is None:
            raise ValueError("the stream ended before response.completed")
        usage = self.response["usage"]
        return Told(
            Answer(self.text, tuple(self.calls)),
            prompt_tokens=usage["input_tokens"],
            cached_tokens=usage["input_tokens_details"]["cached_tokens"],
            output_tokens=usage["output_tokens"],
        )
