"""A daemon whose scripted model reasons and calls tools, and Ollama's client in front of it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from ollama import Client

from engine.values.request import Request
from server.settings import Settings
from tests.contract.conftest import CLIENT_SECONDS
from tests.contract.daemon import running
from tests.contract.fake_engine import ByteTokenizer, FakeEngine, Script
from tests.contract.test_tools import PING, THINK, WEATHER, RecordingTokenizer

USER = {"role": "user", "content": "How is the weather?"}
TOOLS = [WEATHER, PING]
ARGUMENTS = {"city": 'Köln <&> "x"', "days": 3}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln <&> \\"x\\"", "days": 3}}'
CALL += "\n</tool_call>"

OllamaClient = Any
"""It checks its answers' types as it runs."""


@dataclass
class Daemon:
    engine: FakeEngine
    client: OllamaClient
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

    def say(self, *answers: str, **script: Any) -> None:
        self.engine.script = Script(answers=answers, **script)

    def chat(self, *messages: Mapping[str, Any], **fields: Any) -> Any:
        return self.client.chat("bytes", messages or (USER,), **fields)

    def post(self, path: str = "/api/chat", **fields: Any) -> httpx.Response:
        """As a client that knows no types. Whole, unless it asks for a stream."""
        asked = {"messages": [USER]} if path == "/api/chat" else {"prompt": "Hi"}
        return self.http.post(path, json={"model": "bytes", "stream": False, **asked, **fields})

    def lines(self, path: str = "/api/chat", **fields: Any) -> list[dict[str, Any]]:
        """A stream's, each of which must be JSON."""
        answer = self.post(path, stream=True, **fields)
        assert answer.headers["content-type"] == "application/x-ndjson"
        return [json.loads(line) for line in answer.text.removesuffix("\n").split("\n")]


@contextmanager
def daemon(
    tokenizer: ByteTokenizer | None = None, engine: type[FakeEngine] = FakeEngine, **settings: Any
) -> Iterator[Daemon]:
    made = engine(tokenizer=tokenizer or RecordingTokenizer(chat_template=THINK))
    settings = {"tool_parser": "hermes", "served_model_name": ("bytes",)} | settings
    with (
        running(made, Settings(port=0, **settings)) as url,
        Client(url, timeout=CLIENT_SECONDS) as client,
        httpx.Client(base_url=url, timeout=CLIENT_SECONDS) as http,
    ):
        yield Daemon(made, client, http)
