"""Greedy completions of token ids, heard token by token."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from server.terminal.client import EventStream

PATIENCE = 1200.0
"""Seconds; nothing takes that long, unless the machine is somebody else's for a while."""

TOLERANCE = 1e-3
"""Log-probabilities differ by 2e-5 at most by what is computed beside a row, and in which pieces.
One block of other tokens, anywhere in a prompt, makes them differ by 0.04 at least."""


@dataclass(slots=True)
class Heard:
    """What came of an answer, as far as it went. `leads` is how much likelier each token was than
    the second best.
    """

    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    leads: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # from sending to each piece of text
    usage: dict[str, Any] = field(default_factory=dict)
    is_whole: bool = False

    @property
    def cached_tokens(self) -> int:
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])

    def hear(self, chunk: dict[str, Any], seconds: float) -> None:
        """Raises ValueError where the stream has an error."""
        if "error" in chunk:
            raise ValueError(chunk["error"])
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk["choices"]:
            if told := choice["logprobs"]:
                self.seconds.append(seconds)
                self.tokens += told["tokens"]
                self.logprobs += told["token_logprobs"]
                self.leads += map(_lead, told["top_logprobs"])

    def differs(self, other: "Heard") -> str:
        """In what, as far as both go; nothing where they agree."""
        both = list(zip(self.tokens, other.tokens, strict=False))
        if wrong := [at for at, (mine, others) in enumerate(both) if mine != others]:
            return f"token {wrong[0]}: {both[wrong[0]]}"
        pairs = zip(self.logprobs, other.logprobs, strict=False)
        worst = max((abs(a - b) for a, b in pairs), default=0.0)
        return f"log-probabilities by {worst:.4f}" if worst > TOLERANCE else ""


def _lead(logprobs: dict[str, float]) -> float:
    best, second = sorted(logprobs.values(), reverse=True)
    return best - second


async def ask(
    http: httpx.AsyncClient, prompt: Sequence[int], max_tokens: int, heard: Heard
) -> None:
    """Raises httpx.HTTPError, and ValueError for an answer that ends with an error."""
    body = {
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began = time.perf_counter()
    async with http.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != httpx.codes.OK:
            raise ValueError(f"HTTP {response.status_code}: {await response.aread()!r}")
        events = EventStream()
        async for piece in response.aiter_bytes():
            for data in events.feed(piece):
                if data == b"[DONE]":
                    heard.is_whole = True
                else:
                    heard.hear(json.loads(data), time.perf_counter() - began)


def client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=PATIENCE, trust_env=False)
