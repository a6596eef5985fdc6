"""Plays agents' sessions turn by turn, so that dialects take turns within seconds."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import httpx

from load_tests.agents.dialects.dialect import Ask, Dialect, Told, UserTurn
from load_tests.agents.recording import Answer, Recording, Turn
from load_tests.agents.styles import Style
from load_tests.agents.tokens import Computed, PromptTokens
from load_tests.client import Target, TargetError
from server.terminal.client import EventStream

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Exchange:
    """One turn of one session."""

    dialect: str
    seat: int  # the session's place among those of its dialect
    turn: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    common_tokens: int  # with what was computed before, all but the last token at most
    seconds: float  # from sending the body to the end of the stream
    cpu_seconds: float  # of the daemon, all threads together

    @property
    def share(self) -> float:
        """Of what was there to adopt."""
        return self.cached_tokens / self.common_tokens if self.common_tokens else 1.0


@dataclass(slots=True)
class Session:
    """An agent that speaks one dialect. `number` is its own among all that a player plays."""

    dialect: Dialect
    seat: int
    number: int
    recording: Recording
    history: list[UserTurn | Answer] = field(default_factory=list)

    def ask(self, turn: Turn, model: str, style: Style) -> Ask:
        """Take the user's turn into the history; the request that goes out then."""
        self.history.append(UserTurn(self._results(turn), turn.text))
        own = self.recording
        return Ask(model, own.system, own.tools, self.history, style.choice, style.max_tokens)

    def _results(self, turn: Turn) -> tuple[tuple[str, str], ...]:
        """A result for each call, whether or not the recording had as many."""
        last = self.history[-1] if self.history else None
        calls = last.calls if isinstance(last, Answer) else ()
        return tuple((call.id, turn.results[i % len(turn.results)]) for i, call in enumerate(calls))


class Player:
    """Remembers what was computed over all that it plays, by a daemon that nobody else asks."""

    def __init__(
        self, target: Target, tokens: PromptTokens, cpu_seconds: Callable[[], float]
    ) -> None:
        """`cpu_seconds` says how many the daemon has used since it was started."""
        self._target = target
        self._tokens = tokens
        self._cpu_seconds = cpu_seconds
        self._computed = Computed()

    async def play(self, sessions: Sequence[Session], style: Style) -> list[Exchange]:
        """A turn of each session in turn, another one first each time. Raises TargetError."""
        turns = zip(*(session.recording.turns for session in sessions), strict=True)
        async with httpx.AsyncClient(timeout=self._target.stall_seconds, trust_env=False) as http:
            return [
                await self._exchange(http, number, session, turn, style)
                for number, of_all in enumerate(turns)
                for session, turn in _turned(list(zip(sessions, of_all, strict=True)), number)
            ]

    async def _exchange(
        self, http: httpx.AsyncClient, number: int, session: Session, turn: Turn, style: Style
    ) -> Exchange:
        ask = session.ask(turn, self._target.model, style)
        cpu_before = self._cpu_seconds()
        told, seconds = await answer(http, self._target.base_url, session.dialect, ask)
        cpu_seconds = self._cpu_seconds() - cpu_before
        prompt = self._tokens.of(ask)
        style.check(told, len(prompt))
        common = self._computed.common(prompt)
        self._computed.add(session.number, prompt, told.prompt_tokens + style.kept_tokens(told))
        session.history.append(style.kept(turn.answer, told))
        return Exchange(
            session.dialect.name,
            session.seat,
            number,
            told.prompt_tokens,
            told.cached_tokens,
            told.output_tokens,
            min(common, told.prompt_tokens - 1),
            seconds,
            cpu_seconds,
        )


def _turned(items: list[T], by: int) -> list[T]:
    start = by % len(items)
    return items[start:] + items[:start]


async def answer(
    http: httpx.AsyncClient, base_url: str, dialect: Dialect, ask: Ask
) -> tuple[Told, float]:
    """The answer and its seconds. Raises TargetError."""
    body = json.dumps(dialect.body(ask)).encode()
    headers = {"Content-Type": "application/json"}
    started = time.perf_counter()
    try:
        async with http.stream(
            "POST", base_url + dialect.path, content=body, headers=headers
        ) as response:
            received = b"".join([piece async for piece in response.aiter_bytes()])
    except httpx.HTTPError as error:
        raise TargetError(f"{dialect.name}: {error!r}") from error
    seconds = time.perf_counter() - started
    if response.status_code != httpx.codes.OK:
        detail = received.decode(errors="replace")[:500]
        raise TargetError(f"{dialect.name}: HTTP {response.status_code}: {detail}")
    return read(dialect, received), seconds


def read(dialect: Dialect, stream: bytes) -> Told:
    """What a whole stream says. Raises TargetError."""
    reader = dialect.reader()
    try:
        for data in EventStream().feed(stream):
            if data != b"[DONE]":
                reader.hear(json.loads(data))
        return reader.told()
    except (KeyError, TypeError, ValueError) as error:
        end = stream[-500:].decode(errors="replace")
        raise TargetError(f"{dialect.name}: {error!r} in a stream that ends {end}") from error
