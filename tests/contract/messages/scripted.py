"""Anthropic's client before a scripted model."""

from typing import Any

import httpx

from tests.contract.scripted import USER, Daemon

WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
}
PING = {"name": "ping", "input_schema": {"type": "object"}}
TOOLS = [WEATHER, PING]


class MessagesDaemon(Daemon):
    def create(self, **fields: Any) -> Any:
        return self.anthropic.messages.create(**_body(fields))

    def stream(self, **fields: Any) -> Any:
        return self.anthropic.messages.stream(**_body(fields))

    def post(self, **fields: Any) -> httpx.Response:
        """As a client that knows no types."""
        return self.http.post("/v1/messages?beta=true", json=_body(fields))


def _body(fields: dict[str, Any]) -> dict[str, Any]:
    return {"model": "bytes", "messages": [USER], "max_tokens": 450, **fields}
