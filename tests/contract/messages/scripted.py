"""A daemon whose scripted model reasons and calls tools, and Anthropic's client in front of it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from engine.values.request import Request
from server.settings import Settings
from tests.contract.conftest import CLIENT_SECONDS, AnthropicClient, anthropic_client
from tests.contract.daemon import running
from tests.contract.fake_engine import ByteTokenizer, FakeEngine, Script
from tests.contract.test_tools import THINK, RecordingTokenizer

USER = {"role": "user", "content": "How is the weather?"}
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
INPUT = {"city": 'Köln <&> "x"', "days": 3}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln <&> \\"x\\"", "days": 3}}'
CALL += "\n</tool_call>"


@dataclass
class Daemon:
    engine: FakeEngine
    client: AnthropicClient
    http: httpx.Client

    @property
    def given(self) -> tuple[Sequence[Mapping[str, Any]], dict[str, Any]]:
        """What the template was given last."""
        assert isinstance(self.engine.tokenizer, RecordingTokenizer)
        return self.engine.tokenizer.given[-1]

    @property
    def asked(self) -> Request:
        """What the engine was asked last."""
        last = self.engine.submitted.get_nowait()
        while not self.engine.submitted.empty():
            last = self.engine.submitted.get_nowait()
        return last

    def say(self, answer: str, **script: Any) -> None:
        self.engine.script = Script(answers=(answer,), **script)

    def create(self, **fields: Any) -> Any:
        return self.client.messages.create(**_body(fields))

    def stream(self, **fields: Any) -> Any:
        return self.client.messages.stream(**_body(fields))

    def post(self, **fields: Any) -> httpx.Response:
        """As a client that knows no types."""
        return self.http.post("/v1/messages?beta=true", json=_body(fields))


def _body(fields: dict[str, Any]) -> dict[str, Any]:
    return {"model": "bytes", "messages": [USER], "max_tokens": 450, **fields}


@contextmanager
def daemon(
    tokenizer: ByteTokenizer | None = None, engine: type[FakeEngine] = FakeEngine, **settings: Any
) -> Iterator[Daemon]:
    made = engine(tokenizer=tokenizer or RecordingTokenizer(chat_template=THINK))
    settings = {"tool_parser": "hermes", "served_model_name": ("bytes",)} | settings
    with (
        running(made, Settings(port=0, **settings)) as url,
        anthropic_client(url) as client,
        httpx.Client(base_url=url, timeout=CLIENT_SECONDS) as http,
    ):
        yield Daemon(made, client, http)
