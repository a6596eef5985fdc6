"""Asks a server that speaks OpenAI's chat completions, and keeps the times."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from server.terminal.client import EventStream

SESSION_HEADER = "X-Session-ID"  # by which a router keeps a conversation on one server


Message = Mapping[str, Any]
"""One of a chat completion: its role, and its content, which is text or a list of parts."""


class TargetError(Exception):
    """The server refused, broke off, stalled, or did other work than it was asked for."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where the requests go. `base_url` ends in /v1; `model` is what the server calls its own."""

    base_url: str
    model: str
    api_key: str = ""
    stall_seconds: float = 600.0  # a server silent for this long has failed
    limit_seconds: float = 900.0  # and one that takes this long for a workload, too


@dataclass(frozen=True, slots=True)
class Generation:
    """How answers are generated. Those of fewer than `min_tokens` tokens are errors; if that is
    `max_tokens`, the server is asked not to stop at the model's end of text.
    """

    max_tokens: int
    min_tokens: int
    temperature: float = 0.0
    seed: int | None = None

    def fields(self) -> dict[str, Any]:
        """The fields of a chat completion. `top_p` is named because a checkpoint may have a default
        that not every server reads.
        """
        fields = {"max_tokens": self.max_tokens, "temperature": self.temperature, "top_p": 1.0}
        if self.min_tokens == self.max_tokens:
            fields["ignore_eos"] = True
        if self.seed is not None:
            fields["seed"] = self.seed
        return fields

    def allows(self, n_tokens: object, finish_reason: str | None) -> bool:
        """Whether an answer may have that many tokens and that end."""
        if not isinstance(n_tokens, int):
            return False
        if finish_reason == "length":
            return n_tokens == self.max_tokens
        is_between = self.min_tokens <= n_tokens <= self.max_tokens
        return finish_reason == "stop" and is_between and self.min_tokens < self.max_tokens


def exactly(output_tokens: int) -> Generation:
    """Greedy answers of `output_tokens` tokens each."""
    return Generation(max_tokens=output_tokens, min_tokens=output_tokens)


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished request. Times are seconds; `started_seconds` counts from the run's start."""

    wave: int
    conversation: int
    turn: int
    started_seconds: float
    first_token_seconds: float  # from sending to the first piece of text
    latency_seconds: float  # from sending to [DONE]
    gap_seconds: tuple[float, ...]  # between one piece of text and the next
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    drafted_tokens: int  # draft tokens that were verified, where the server reports them
    accepted_tokens: int  # those that are part of the answer
    text: str


async def discover(base_url: str, api_key: str = "") -> Target:
    """A target that asks for the first model the server lists. Raises TargetError."""
    headers = _headers(api_key)
    async with httpx.AsyncClient(headers=headers, timeout=10, trust_env=False) as http:
        try:
            response = await http.get(f"{base_url}/models")
            response.raise_for_status()
            return Target(base_url, response.json()["data"][0]["id"], api_key)
        except (httpx.HTTPError, ValueError, LookupError) as error:
            raise TargetError(f"{base_url}/models: {error!r}") from error


@asynccontextmanager
async def limited(target: Target) -> AsyncIterator[None]:
    """Raises TargetError when the body takes longer than the target may."""
    try:
        async with asyncio.timeout(target.limit_seconds):
            yield
    except TimeoutError as error:
        raise TargetError(f"not done after {target.limit_seconds:.0f} s") from error


@asynccontextmanager
async def connected(target: Target) -> AsyncIterator["Asker"]:
    """An Asker whose connections are closed at the end."""
    async with httpx.AsyncClient(
        headers=_headers(target.api_key),
        timeout=httpx.Timeout(target.stall_seconds, connect=10),
        limits=httpx.Limits(max_connections=None),
        trust_env=False,
    ) as http:
        yield Asker(http, target)


@dataclass(frozen=True, slots=True)
class Asker:
    """Sends requests to one server."""

    http: httpx.AsyncClient
    target: Target

    async def ask(
        self,
        messages: Sequence[Message],
        generation: Generation,
        listener: "Listener",
        session: str = "",
    ) -> None:
        """Request a streamed answer and let `listener` hear it to its end.

        Raises TargetError.
        """
        body = {
            "model": self.target.model,
            "messages": messages,
            **generation.fields(),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        url = f"{self.target.base_url}/chat/completions"
        headers = {SESSION_HEADER: session} if session else {}
        listener.started = time.perf_counter()
        try:
            async with self.http.stream("POST", url, json=body, headers=headers) as response:
                if response.status_code != httpx.codes.OK:
                    detail = (await response.aread()).decode(errors="replace")
                    raise TargetError(f"HTTP {response.status_code}: {detail[:500]}")
                stream = EventStream()
                async for piece in response.aiter_bytes():
                    for data in stream.feed(piece):
                        listener.hear(data, time.perf_counter())
        except httpx.ReadTimeout as error:
            raise TargetError(f"silent for {self.target.stall_seconds:g} s") from error
        except httpx.HTTPError as error:
            raise TargetError(f"after {len(listener.heard)} pieces of text: {error!r}") from error

    async def answered(self, messages: Sequence[Message], output_tokens: int) -> "Listener":
        """The greedy answer of `output_tokens` tokens. Raises TargetError as `ask` does, and if no
        text came.
        """
        listener = Listener()
        await self.ask(messages, exactly(output_tokens), listener)
        if not listener.heard:
            raise TargetError("a prompt was not answered")
        return listener

    async def counted(self, metric: str) -> int | None:
        """The total of one of the server's counters; None where it has no such metric.

        Raises TargetError when it cannot be asked.
        """
        url = f"{self.target.base_url.removesuffix('/v1')}/metrics"
        try:
            response = await self.http.get(url)
        except httpx.HTTPError as error:
            raise TargetError(f"{url}: {error!r}") from error
        pattern = rf"^{metric}(?:{{.*}})? (\S+)$"
        found = re.findall(pattern, response.text, re.MULTILINE) if response.is_success else []
        return round(sum(map(float, found))) if found else None


class Listener:
    """Gathers one stream. Times are those of `time.perf_counter`; `started` is when it was asked
    for, `heard` when each piece of text came.
    """

    def __init__(self) -> None:
        self.started = 0.0
        self.heard: list[float] = []
        self.text = ""
        self.done: float | None = None
        self.finish_reason: str | None = None
        self.usage: dict[str, Any] = {}

    @property
    def first_text_seconds(self) -> float:
        """From the request to the first piece of text. Raises IndexError before that."""
        return self.heard[0] - self.started

    def hear(self, data: bytes, now: float) -> None:
        """Take in one event's data."""
        if data == b"[DONE]":
            self.done = now
            return
        try:
            self._hear_chunk(json.loads(data), now)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise TargetError(
                f"not a chunk of a chat completion: {data[:500].decode(errors='replace')}"
            ) from error

    def _hear_chunk(self, chunk: dict[str, Any], now: float) -> None:
        if "error" in chunk:
            raise TargetError(f"error in the stream: {chunk['error']}")
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk["choices"]:
            self.finish_reason = choice["finish_reason"] or self.finish_reason
            if text := choice["delta"].get("content"):
                self.text += text
                self.heard.append(now)

    def answer(self, asked: Generation, start: float, place: tuple[int, int, int]) -> Answer:
        """The record of a stream that ended as it should; TargetError of one that did not."""
        if self.done is None:
            raise TargetError(f"the stream ended without [DONE] after {len(self.heard)} pieces")
        generated = self.usage.get("completion_tokens")
        if not asked.allows(generated, self.finish_reason) or not self.heard:
            raise TargetError(
                f"asked for {asked.max_tokens} tokens; got {generated}, "
                f"{len(self.heard)} pieces of text, finish_reason {self.finish_reason}"
            )
        details = self.usage.get("prompt_tokens_details") or {}
        drafts = self.usage.get("completion_tokens_details") or {}
        accepted_tokens = drafts.get("accepted_prediction_tokens", 0)
        return Answer(
            *place,
            started_seconds=self.started - start,
            first_token_seconds=self.first_text_seconds,
            latency_seconds=self.done - self.started,
            gap_seconds=tuple(b - a for a, b in zip(self.heard, self.heard[1:], strict=False)),
            prompt_tokens=self.usage["prompt_tokens"],
            cached_tokens=details.get("cached_tokens", 0),
            completion_tokens=self.usage["completion_tokens"],
            drafted_tokens=accepted_tokens + drafts.get("rejected_prediction_tokens", 0),
            accepted_tokens=accepted_tokens,
            text=self.text,
        )


def message(role: str, content: str, images: Sequence[str] = ()) -> dict[str, Any]:
    """As the chat completions have it; `images` are `data:` URLs, and precede the text."""
    if not images:
        return {"role": role, "content": content}
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in images]
    return {"role": role, "content": [*parts, {"type": "text", "text": content}]}


def _headers(api_key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}
