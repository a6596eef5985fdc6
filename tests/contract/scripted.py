"""A daemon whose scripted model reasons and calls tools, and a client of each dialect before it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

import httpx
from anthropic import Anthropic
from ollama import Client
from openai import OpenAI

from engine.values.model import NO_REPLAYS, Replay
from engine.values.request import Request
from server.settings import Settings
from tests.contract.daemon import running
from tests.contract.fake_engine import ByteTokenizer, FakeEngine, Script

CLIENT_SECONDS = 20.0

StrictClient = Any
"""An OpenAI client. It checks its answers' types as it runs, more strictly than its unions say."""

AnthropicClient = Any
"""An Anthropic client that checks its answers' types as it runs."""

OllamaClient = Any
"""An Ollama client. It always checks its answers' types."""

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
PING = {"type": "function", "function": {"name": "ping"}}
TOOLS = [WEATHER, PING]
USER = {"role": "user", "content": "How is the weather?"}
CALL = ("get_weather", {"city": 'Köln <&> "x"', "days": 3})
NO_ARGUMENTS: tuple[str, dict[str, Any]] = ("ping", {})
ARGUMENTS = json.dumps(CALL[1], ensure_ascii=False)

THINK = "<think> and </think>, <tool_call> "
"""A chat template's words, by which the server knows a model's formats."""

HERMES_CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
HERMES_PING = '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'


@dataclass(frozen=True)
class RecordingTokenizer(ByteTokenizer):
    """Keeps what the chat template was given."""

    chat_template: str = THINK
    given: list[tuple[Sequence[Mapping[str, Any]], dict[str, Any]]] = field(default_factory=list)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        replays: Mapping[int, Replay] = NO_REPLAYS,
        /,
        **template_arguments: object,
    ) -> list[int]:
        self.given.append((messages, template_arguments))
        return super().apply_chat_template(messages)


@dataclass(frozen=True)
class OpeningTokenizer(RecordingTokenizer):
    """Its template begins the assistant's reasoning."""

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        replays: Mapping[int, Replay] = NO_REPLAYS,
        /,
        **template_arguments: object,
    ) -> list[int]:
        ids = super().apply_chat_template(messages, **template_arguments)
        return [*ids, *b"<think>\n"]


def strict_client(base_url: str, api_key: str = "none") -> StrictClient:
    """The SDK, with responses checked against its types and no retries to hide errors."""
    return OpenAI(
        base_url=f"{base_url}/v1",
        api_key=api_key,
        max_retries=0,
        timeout=CLIENT_SECONDS,
        _strict_response_validation=True,
    )


def anthropic_client(base_url: str, api_key: str = "none") -> AnthropicClient:
    """Anthropic's SDK, with responses checked against its types and no retries."""
    return Anthropic(
        base_url=base_url,
        api_key=api_key,
        max_retries=0,
        timeout=CLIENT_SECONDS,
        _strict_response_validation=True,
    )


@dataclass
class Daemon:
    """The model answers as its script says, and what it was asked is recorded."""

    engine: FakeEngine
    url: str
    clients: ExitStack

    @classmethod
    @contextmanager
    def serving(
        cls,
        tokenizer: ByteTokenizer | None = None,
        engine: type[FakeEngine] = FakeEngine,
        **settings: Any,
    ) -> Iterator[Self]:
        """Its model reasons and writes its calls as Hermes does, unless the settings say other."""
        made = engine(tokenizer=tokenizer or RecordingTokenizer())
        settings = {"tool_parser": "hermes", "served_model_name": ("bytes",)} | settings
        with running(made, Settings(port=0, **settings)) as url, ExitStack() as clients:
            yield cls(made, url, clients)

    @cached_property
    def openai(self) -> StrictClient:
        return self.clients.enter_context(strict_client(self.url))

    @cached_property
    def anthropic(self) -> AnthropicClient:
        return self.clients.enter_context(anthropic_client(self.url))

    @cached_property
    def ollama(self) -> OllamaClient:
        return self.clients.enter_context(Client(self.url, timeout=CLIENT_SECONDS))

    @cached_property
    def http(self) -> httpx.Client:
        client = httpx.Client(base_url=self.url, timeout=CLIENT_SECONDS)
        return self.clients.enter_context(client)

    @property
    def given(self) -> tuple[Sequence[Mapping[str, Any]], dict[str, Any]]:
        """The messages and arguments that the template was given last."""
        assert isinstance(self.engine.tokenizer, RecordingTokenizer)
        return self.engine.tokenizer.given[-1]

    @property
    def asked(self) -> Request:
        """The request that the engine was given last."""
        last = self.engine.submitted.get_nowait()
        while not self.engine.submitted.empty():
            last = self.engine.submitted.get_nowait()
        return last

    def say(self, *answers: str, **script: Any) -> None:
        self.engine.script = Script(answers=answers, **script)

    def create(self, **fields: Any) -> Any:
        """A chat completion with two tools, whole or as the chunks of a stream."""
        return self.openai.chat.completions.create(
            **{"model": "bytes", "messages": [USER], "tools": TOOLS, "max_tokens": 450} | fields
        )
