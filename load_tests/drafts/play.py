"""A load is asked once, with drafts or without."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from load_tests.client import TargetError
from load_tests.drafts.bodies import Body
from load_tests.drafts.loads import Load, Stream


@dataclass(frozen=True, slots=True)
class Answer:
    """`said` is what must be the same with drafts and without."""

    said: str
    output_tokens: int
    accepted: int
    rejected: int


@dataclass(frozen=True, slots=True)
class Turn:
    """What became of a load. Drafts are counted in tokens."""

    seconds: float
    answers: tuple[Answer, ...]

    @property
    def output_tokens(self) -> int:
        return sum(answer.output_tokens for answer in self.answers)

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def accepted(self) -> int:
        return sum(answer.accepted for answer in self.answers)

    @property
    def rejected(self) -> int:
        return sum(answer.rejected for answer in self.answers)


@dataclass(frozen=True, slots=True)
class Player:
    """Asks one model, as one who shares nothing with others that have another salt: neither what
    is cached nor what has been answered.
    """

    http: httpx.AsyncClient
    salt: str
    speculate: bool

    async def play(self, load: Load) -> Turn:
        """Raises TargetError for an answer that is none."""
        unmeasured = Player(self.http, self.salt, speculate=False)
        await asyncio.gather(*(unmeasured.ask(load.model, body) for body in load.before))
        start = time.perf_counter()
        streams = await asyncio.gather(*(self._stream(load.model, each) for each in load.streams))
        seconds = time.perf_counter() - start
        return Turn(seconds, tuple(answer for stream in streams for answer in stream))

    async def _stream(self, model: str, stream: Stream) -> list[Answer]:
        return [await self.ask(model, body) for body in stream]

    async def ask(self, model: str, body: Body) -> Answer:
        fields = {"model": model, "cache_salt": self.salt, "speculate": self.speculate}
        try:
            response = await self.http.post("/v1/chat/completions", json={**body, **fields})
        except httpx.HTTPError as error:
            raise TargetError(repr(error)) from error
        if response.status_code != httpx.codes.OK:
            raise TargetError(f"HTTP {response.status_code}: {response.text[:500]}")
        return answer(response.json())


def answer(completion: Mapping[str, Any]) -> Answer:
    """Of a chat completion's JSON. Identifiers of calls are drawn, so they are left out."""
    (choice,) = completion["choices"]
    calls: Sequence[Mapping[str, Any]] = choice["message"].get("tool_calls") or ()
    functions = [f"{call['function']['name']}({call['function']['arguments']})" for call in calls]
    said = "".join([choice["message"]["content"] or "", *functions])
    usage = completion["usage"]
    details = usage["completion_tokens_details"]
    return Answer(
        f"{said} [{choice['finish_reason']}]",
        usage["completion_tokens"],
        details["accepted_prediction_tokens"],
        details["rejected_prediction_tokens"],
    )
