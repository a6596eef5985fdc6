"""What requests come to when a replica ends.

Each replica computes one sequence at a time, so that one of its requests has begun to stream while
others have not. Those must reach another replica, as must all that come later.
"""

import asyncio
import json
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import httpx

from load_tests.client import SESSION_HEADER, Target, TargetError
from load_tests.replicas.fleet import Replica, replicas, routed, urls
from server.terminal.client import EventStream

USERS = 8
OUTPUT_TOKENS = 64
BUSY_SECONDS = 30.0


class Fate(Enum):
    FINISHED = "finished"
    CUT = "cut after it had begun"
    FAILED = "failed before it had begun"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one request; `detail` says what was wrong."""

    fate: Fate
    detail: str = ""


Play = Callable[["Users", Sequence[Replica]], Awaitable[list[Outcome]]]


@dataclass(frozen=True, slots=True)
class Ending:
    """How a replica ends, and what requests may come to then."""

    name: str
    allowed: frozenset[Fate]
    play: Play


@dataclass(frozen=True, slots=True)
class Losses:
    """What the requests around one replica's end came to."""

    ending: Ending
    outcomes: tuple[Outcome, ...]

    def count(self, fate: Fate) -> int:
        return Counter(outcome.fate for outcome in self.outcomes)[fate]

    def forbidden(self) -> list[str]:
        """What should not have happened."""
        return [
            f"{self.ending.name}: {outcome.fate.value}: {outcome.detail}"
            for outcome in self.outcomes
            if outcome.fate not in self.ending.allowed
        ]


def measure(ending: Ending, router_flags: Sequence[str]) -> Losses:
    """End one of two replicas behind consistent_hash. Raises TargetError."""
    with (
        replicas(2, "--max-running", "1") as fleet,
        routed("consistent_hash", urls(fleet), *router_flags) as target,
    ):
        return Losses(ending, tuple(asyncio.run(_play(ending, fleet, target))))


async def _play(ending: Ending, fleet: Sequence[Replica], target: Target) -> list[Outcome]:
    async with httpx.AsyncClient(timeout=target.stall_seconds, trust_env=False) as http:
        return await ending.play(Users(http, target), fleet)


async def _killed_busy(users: "Users", fleet: Sequence[Replica]) -> list[Outcome]:
    return await _end_busy(users, fleet, signal.SIGKILL)


async def _drained_busy(users: "Users", fleet: Sequence[Replica]) -> list[Outcome]:
    return await _end_busy(users, fleet, signal.SIGTERM)


async def _end_busy(
    users: "Users", fleet: Sequence[Replica], ending: signal.Signals
) -> list[Outcome]:
    before = asyncio.create_task(users.all_at_once())
    victim = await asyncio.to_thread(_busy, fleet)
    victim.process.send_signal(ending)
    return await users.all_at_once() + await before


async def _killed_idle(users: "Users", fleet: Sequence[Replica]) -> list[Outcome]:
    """The harder case for a router: no crowd of failures tells it that the replica has gone."""
    before = await users.one_by_one()
    victim = max(fleet, key=Replica.prompt_tokens)
    victim.process.kill()
    victim.process.wait()
    return before + await users.one_by_one()


ENDINGS = (
    Ending("killed, busy", frozenset({Fate.FINISHED, Fate.CUT}), _killed_busy),
    Ending("killed, idle", frozenset({Fate.FINISHED}), _killed_idle),
    Ending("drained, busy", frozenset({Fate.FINISHED}), _drained_busy),
)


def _busy(fleet: Sequence[Replica]) -> Replica:
    """Wait for a replica of whose requests some have begun and some have not."""
    deadline = time.monotonic() + BUSY_SECONDS
    while time.monotonic() < deadline:
        for replica in fleet:
            generated = replica.output_tokens()
            if any(generated) and not all(generated):
                return replica
        time.sleep(0.01)
    raise TargetError(f"no replica had a request begun and one waiting in {BUSY_SECONDS:.0f} s")


@dataclass(frozen=True, slots=True)
class Users:
    """Sessions that ask one question each, every other one as a stream."""

    http: httpx.AsyncClient
    target: Target

    async def all_at_once(self) -> list[Outcome]:
        return list(await asyncio.gather(*(self._ask(user) for user in range(USERS))))

    async def one_by_one(self) -> list[Outcome]:
        return [await self._ask(user) for user in range(USERS)]

    async def _ask(self, user: int) -> Outcome:
        body = {
            "model": self.target.model,
            "messages": [{"role": "user", "content": f"Tell me the story of number {user}."}],
            "max_tokens": OUTPUT_TOKENS,
            "ignore_eos": True,
            "stream": user % 2 == 0,
        }
        url = f"{self.target.base_url}/chat/completions"
        headers = {SESSION_HEADER: f"user-{user}"}
        received = b""
        try:
            async with self.http.stream("POST", url, json=body, headers=headers) as response:
                async for piece in response.aiter_bytes():
                    received += piece
        except httpx.HTTPError as error:
            return Outcome(Fate.CUT if received else Fate.FAILED, repr(error))
        return outcome(response.status_code, received)


def outcome(status: int, body: bytes) -> Outcome:
    """Of an answer that came to its end, in bytes."""
    text = body.decode(errors="replace")[-300:]
    if status != httpx.codes.OK:
        return Outcome(Fate.FAILED, f"HTTP {status}: {text}")
    if body.startswith(b"{"):
        finish = json.loads(body)["choices"][0]["finish_reason"]
        return Outcome(Fate.FINISHED) if finish == "length" else Outcome(Fate.FAILED, text)
    last = [b"", *EventStream().feed(body)][-1]
    return Outcome(Fate.FINISHED) if last == b"[DONE]" else Outcome(Fate.CUT, text)
