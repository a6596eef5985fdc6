"""One adapter for each dialect: how it is asked, and how its answers, streams and errors are read.

What the answers mean is the same in all of them: the tests of this folder hold them to it.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import httpx
import ollama
import openai
from anthropic import APIStatusError

from tests.contract.scripted import TOOLS, Daemon

ENOUGH_TOKENS = 450
Event = Mapping[str, Any]
Functions = Sequence[Mapping[str, Any]]
WEATHER_AND_PING: Functions = [tool["function"] for tool in TOOLS]  # type: ignore[misc]


@dataclass(frozen=True, slots=True)
class Question:
    """What any dialect can ask: functions as in a chat's tools, and a schema for the answer."""

    text: str = "Hi"
    max_tokens: int = ENOUGH_TOKENS
    functions: Functions = ()
    schema: Mapping[str, Any] | None = None
    temperature: float | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client reads. `finish` is the dialect's own word for the reason of the end."""

    text: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]
    finish: str
    prompt_tokens: int
    cached_tokens: int | None
    completion_tokens: int


class Dialect(ABC):
    """`refused` is what its official client raises, and `finishes` has its words for an end."""

    path: ClassVar[str]
    refused: ClassVar[type[Exception]]
    finishes: ClassVar[Mapping[str, str]]
    has_tools: ClassVar[bool] = True

    def __repr__(self) -> str:
        return type(self).__name__

    @abstractmethod
    def body_of(self, question: Question) -> dict[str, Any]:
        """A request for an answer in one piece. Completions have neither functions nor schemas."""

    @abstractmethod
    def _ask(self, daemon: Daemon, body: dict[str, Any]) -> Any:
        """The answer of the official client, or the events of a stream."""

    @abstractmethod
    def whole(self, body: Mapping[str, Any]) -> Answer:
        """Read an answer in one piece."""

    @abstractmethod
    def streamed(self, events: Iterable[Event]) -> Answer:
        """Read the events of a complete stream, pings among them."""

    @abstractmethod
    def error(self, answer: httpx.Response) -> tuple[str, str | None]:
        """Message and kind of an error with a status. Fails if it has other keys."""

    @abstractmethod
    def failure(self, event: Event) -> str:
        """The message of the event with which a stream fails. Fails if it has other keys."""

    @abstractmethod
    def is_ping(self, event: Event | None) -> bool:
        """Whether an event only keeps the connection open. Comments are None."""

    def body(self, **asked: Any) -> dict[str, Any]:
        """A request for an answer in one piece; the fields are those of a Question."""
        question = Question(**asked)
        body = self.body_of(question)
        if question.temperature is not None:
            body["temperature"] = question.temperature
        return body

    def stream_body(self, **question: Any) -> dict[str, Any]:
        """A request for a stream that ends with its usage."""
        return {**self.body(**question), "stream": True}

    def ask(self, daemon: Daemon, *, stream: bool, **question: Any) -> Answer:
        """By the official client, which checks the types."""
        if not stream:
            return self.whole(self._ask(daemon, self.body(**question)).model_dump())
        events = self._ask(daemon, self.stream_body(**question))
        return self.streamed([event.model_dump() for event in events])

    def post(
        self,
        http: httpx.Client,
        *,
        stream: bool = False,
        headers: Mapping[str, str] | None = None,
        more: Mapping[str, Any] = MappingProxyType({}),
        **question: Any,
    ) -> httpx.Response:
        """As a client that knows no types, with more fields of the body."""
        body = self.stream_body(**question) if stream else self.body(**question)
        return http.post(self.path, json={**body, **more}, headers=headers)

    def read(self, answer: httpx.Response) -> Answer:
        """Of a stream or in one piece, by what it says that it is."""
        assert answer.status_code == 200, answer.text
        if answer.headers["content-type"] == "application/json":
            return self.whole(answer.json())
        events = self.events(answer.text.splitlines())
        return self.streamed([event for event in events if event is not None])

    def events(self, lines: Iterable[str]) -> Iterator[Event | None]:
        """Those of a stream as they come: JSON objects, and None for comments."""
        for line in lines:
            if line.startswith(":"):
                yield None
            elif (data := line.removeprefix("data: ")).startswith("{"):
                yield json.loads(data)


def messages_of(question: Question) -> dict[str, Any]:
    """Of the model that the daemon has."""
    return {"model": "", "messages": [{"role": "user", "content": question.text}]}


class OpenAIDialect(Dialect):
    """Its errors are OpenAI's, in streams as with a status."""

    refused = openai.APIError

    def error(self, answer: httpx.Response) -> tuple[str, str | None]:
        body = answer.json()
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}
        return body["error"]["message"], body["error"]["code"]

    def failure(self, event: Event) -> str:
        assert set(event) == {"error"}
        assert set(event["error"]) == {"message", "type", "param", "code"}
        return str(event["error"]["message"])

    def is_ping(self, event: Event | None) -> bool:
        return event is None


class UsageOnRequest(OpenAIDialect):
    """Its streams have no usage unless it is asked for."""

    def stream_body(self, **question: Any) -> dict[str, Any]:
        return {**super().stream_body(**question), "stream_options": {"include_usage": True}}


class Chat(UsageOnRequest):
    path = "/v1/chat/completions"
    finishes = {"stop": "stop", "length": "length", "calls": "tool_calls"}  # noqa: RUF012

    def body_of(self, question: Question) -> dict[str, Any]:
        body = {**messages_of(question), "max_tokens": question.max_tokens}
        if question.functions:
            body["tools"] = [{"type": "function", "function": each} for each in question.functions]
        if question.schema is not None:
            format = {"name": "answer", "schema": question.schema}
            body["response_format"] = {"type": "json_schema", "json_schema": format}
        return body

    def _ask(self, daemon: Daemon, body: dict[str, Any]) -> Any:
        return daemon.openai.chat.completions.create(**body)

    def whole(self, body: Mapping[str, Any]) -> Answer:
        (choice,) = body["choices"]
        message = choice["message"]
        assert message.get("reasoning") == message.get("reasoning_content"), "vLLM's name for it"
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        return Answer(
            message["content"] or "",
            message.get("reasoning_content") or "",
            tuple((call["name"], call["arguments"]) for call in calls),
            choice["finish_reason"],
            *openai_usage(body["usage"]),
        )

    def streamed(self, events: Iterable[Event]) -> Answer:
        *chunks, last = events
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        deltas = [choice["delta"] for choice in choices]
        pieces = [call for delta in deltas for call in delta.get("tool_calls") or ()]
        indices = dict.fromkeys(piece["index"] for piece in pieces)
        calls = [[p["function"] for p in pieces if p["index"] == index] for index in indices]
        (finish,) = (c["finish_reason"] for c in choices if c["finish_reason"])
        return Answer(
            "".join(delta.get("content") or "" for delta in deltas),
            "".join(delta.get("reasoning_content") or "" for delta in deltas),
            tuple((call[0]["name"], "".join(p["arguments"] for p in call)) for call in calls),
            finish,
            *openai_usage(last["usage"]),
        )


class Completions(UsageOnRequest):
    """It has text alone."""

    path = "/v1/completions"
    finishes = {"stop": "stop", "length": "length"}  # noqa: RUF012
    has_tools = False

    def body_of(self, question: Question) -> dict[str, Any]:
        return {"model": "", "prompt": question.text, "max_tokens": question.max_tokens}

    def _ask(self, daemon: Daemon, body: dict[str, Any]) -> Any:
        """Not strict: its types forbid the nulls that the API has in chunks."""
        client = daemon.openai.copy()
        client._strict_response_validation = False
        return client.completions.create(**body)

    def whole(self, body: Mapping[str, Any]) -> Answer:
        (choice,) = body["choices"]
        usage = openai_usage(body["usage"])
        return Answer(choice["text"], "", (), choice["finish_reason"], *usage)

    def streamed(self, events: Iterable[Event]) -> Answer:
        *chunks, last = events
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        (finish,) = (c["finish_reason"] for c in choices if c["finish_reason"])
        text = "".join(choice["text"] for choice in choices)
        return Answer(text, "", (), finish, *openai_usage(last["usage"]))


def openai_usage(usage: Mapping[str, Any]) -> tuple[int, int, int]:
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
    return usage["prompt_tokens"], cached_tokens, usage["completion_tokens"]


class Responses(OpenAIDialect):
    """A failed stream is a failed response. Codex does not count comments, so pings are events."""

    path = "/v1/responses"
    finishes = {"stop": "completed", "length": "incomplete", "calls": "completed"}  # noqa: RUF012

    def body_of(self, question: Question) -> dict[str, Any]:
        body: dict[str, Any] = {"model": "", "input": question.text}
        body["max_output_tokens"] = question.max_tokens
        if question.functions:
            body["tools"] = [{"type": "function", **each} for each in question.functions]
        if question.schema is not None:
            format = {"type": "json_schema", "name": "answer", "schema": question.schema}
            body["text"] = {"format": format}
        return body

    def _ask(self, daemon: Daemon, body: dict[str, Any]) -> Any:
        return daemon.openai.responses.create(**body)

    def whole(self, body: Mapping[str, Any]) -> Answer:
        text, reasoning, calls = "", "", []
        for item in body["output"]:
            if item["type"] == "function_call":
                calls.append((item["name"], item["arguments"]))
            elif item["type"] == "reasoning":
                reasoning += "".join(part["text"] for part in item["content"])
            else:
                text += "".join(part["text"] for part in item["content"])
        usage = body["usage"]
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        cached_tokens = usage["input_tokens_details"]["cached_tokens"]
        tokens = usage["input_tokens"], cached_tokens, usage["output_tokens"]
        return Answer(text, reasoning, tuple(calls), body["status"], *tokens)

    def streamed(self, events: Iterable[Event]) -> Answer:
        """The last event has all; the deltas must come to it."""
        found = [*events]
        assert [event["sequence_number"] for event in found] == [*range(len(found))]
        assert [event["type"] == "response.created" for event in found].index(True) == 0
        answer = self.whole(found[-1]["response"])
        for kind, said in (
            ("response.output_text.delta", answer.text),
            ("response.reasoning_text.delta", answer.reasoning),
            ("response.function_call_arguments.delta", "".join(call[1] for call in answer.calls)),
        ):
            assert "".join(event["delta"] for event in found if event["type"] == kind) == said
        return answer

    def failure(self, event: Event) -> str:
        assert (event["type"], event["response"]["status"]) == ("response.failed", "failed")
        return str(event["response"]["error"]["message"])

    def is_ping(self, event: Event | None) -> bool:
        return event is not None and event["type"] == "response.in_progress"


class Messages(Dialect):
    path = "/v1/messages"
    refused = APIStatusError
    finishes = {"stop": "end_turn", "length": "max_tokens", "calls": "tool_use"}  # noqa: RUF012

    def body_of(self, question: Question) -> dict[str, Any]:
        body = {**messages_of(question), "max_tokens": question.max_tokens}
        if question.functions:
            body["tools"] = [
                {
                    **{name: each[name] for name in each if name != "parameters"},
                    "input_schema": each.get("parameters", {"type": "object"}),
                }
                for each in question.functions
            ]
        if question.schema is not None:
            format = {"type": "json_schema", "schema": question.schema}
            body["output_config"] = {"format": format}
        return body

    def _ask(self, daemon: Daemon, body: dict[str, Any]) -> Any:
        return daemon.anthropic.messages.create(**body)

    def whole(self, body: Mapping[str, Any]) -> Answer:
        blocks = body["content"]
        calls = [block for block in blocks if block["type"] == "tool_use"]
        return Answer(
            "".join(block["text"] for block in blocks if block["type"] == "text"),
            "".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
            tuple((call["name"], call.get("json") or json.dumps(call["input"])) for call in calls),
            body["stop_reason"],
            *self._prompt_tokens(body["usage"]),
            body["usage"]["output_tokens"],
        )

    def streamed(self, events: Iterable[Event]) -> Answer:
        start, *middle, end, stop = (event for event in events if not self.is_ping(event))
        assert (start["type"], stop["type"]) == ("message_start", "message_stop")
        blocks: dict[int, dict[str, Any]] = {}
        fields = {"text_delta": "text", "thinking_delta": "thinking"}
        for event in middle:
            if event["type"] == "content_block_start":
                blocks[event["index"]] = {**event["content_block"], "json": ""}
            elif event["type"] == "content_block_delta":
                block, delta = blocks[event["index"]], event["delta"]
                if (field := fields.get(delta["type"])) is not None:
                    block[field] += delta[field]
                elif delta["type"] == "input_json_delta":
                    block["json"] += delta["partial_json"]
        return self.whole(
            {
                "content": [*blocks.values()],
                "stop_reason": end["delta"]["stop_reason"],
                "usage": start["message"]["usage"]
                | {"output_tokens": end["usage"]["output_tokens"]},
            }
        )

    def _prompt_tokens(self, usage: Mapping[str, Any]) -> tuple[int, int]:
        """All prompt tokens, and the cached ones. No request asks for cache writes."""
        assert usage["cache_creation_input_tokens"] == 0
        cached_tokens = usage["cache_read_input_tokens"]
        return usage["input_tokens"] + cached_tokens, cached_tokens

    def error(self, answer: httpx.Response) -> tuple[str, str | None]:
        body = answer.json()
        assert set(body) == {"type", "error", "request_id"}
        assert answer.headers["request-id"] == answer.headers["x-request-id"] == body["request_id"]
        return self.failure(body), body["error"]["type"]

    def failure(self, event: Event) -> str:
        assert event["type"] == "error"
        assert set(event["error"]) == {"type", "message"}
        return str(event["error"]["message"])

    def is_ping(self, event: Event | None) -> bool:
        return event is not None and event["type"] == "ping"


class Ollama(Dialect):
    """Streams are lines of JSON. Usage does not say how many tokens were cached."""

    path = "/api/chat"
    refused = ollama.ResponseError
    finishes = {"stop": "stop", "length": "length", "calls": "stop"}  # noqa: RUF012

    def body_of(self, question: Question) -> dict[str, Any]:
        options: dict[str, Any] = {"num_predict": question.max_tokens}
        if question.temperature is not None:
            options["temperature"] = question.temperature
        body = {**messages_of(question), "stream": False, "options": options}
        if question.functions:
            body["tools"] = [{"type": "function", "function": each} for each in question.functions]
        if question.schema is not None:
            body["format"] = question.schema
        return body

    def _ask(self, daemon: Daemon, body: dict[str, Any]) -> Any:
        """The client wants a name."""
        return daemon.ollama.chat(**body | {"model": "bytes"})

    def whole(self, body: Mapping[str, Any]) -> Answer:
        return self.streamed([body])

    def streamed(self, events: Iterable[Event]) -> Answer:
        *parts, last = events
        assert [part["done"] for part in (*parts, last)] == [False] * len(parts) + [True]
        messages = [event["message"] for event in (*parts, last)]
        calls = [call["function"] for each in messages for call in each.get("tool_calls") or ()]
        return Answer(
            "".join(message["content"] for message in messages),
            "".join(message.get("thinking") or "" for message in messages),
            tuple((call["name"], json.dumps(call["arguments"])) for call in calls),
            last["done_reason"],
            last["prompt_eval_count"],
            None,
            last["eval_count"],
        )

    def error(self, answer: httpx.Response) -> tuple[str, str | None]:
        return self.failure(answer.json()), None

    def failure(self, event: Event) -> str:
        assert set(event) == {"error"}
        return str(event["error"])

    def is_ping(self, event: Event | None) -> bool:
        return event is not None and not event.get("done", True) and not event["message"]["content"]


DIALECTS: tuple[Dialect, ...] = (Chat(), Completions(), Responses(), Messages(), Ollama())
BODIES = {dialect.path: dialect.body() for dialect in DIALECTS}
"""The least that each takes, by its path."""
