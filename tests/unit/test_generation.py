"""Events on their way from the engine to the answer."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from anyio import current_time, move_on_after, sleep_forever
from starlette.types import Message

from engine.values.output import OutputEvent
from engine.values.request import Request
from server.activity.tracker import RequestTracker
from server.budget import Budget, Reservation
from server.dialects.base import StreamingBuilder
from server.dialects.delivery import streamed
from server.errors import ApiError, ClientDisconnected
from server.generation.events import MergedEvents, UsageMeter, generating
from server.http.stream import client_waiting
from server.http.unsent import queued_bytes
from server.record import Principal, RequestRecord
from tests.contract.fake_engine import FakeEngine

EVENT = OutputEvent("r", 0, text="word")
EVENT_BYTES = queued_bytes(EVENT)


class Endless(FakeEngine):
    """An engine that always has the next event ready, whatever else happens."""

    async def generate(self, request: Request) -> AsyncGenerator[OutputEvent, None]:
        loop = asyncio.get_running_loop()
        try:
            while True:
                ready = loop.create_future()
                loop.call_soon(ready.set_result, None)
                await ready
                yield EVENT
        finally:
            self.aborted.put(request.id)


@contextmanager
def reserved(max_bytes: int = 10**9) -> Iterator[Reservation]:
    """Memory for an answer that nobody else needs."""

    def too_large() -> ApiError:
        return ApiError(400, f"More than {max_bytes} bytes")

    budget = Budget(max_bytes, 10**9, too_large=too_large, too_much=too_large)
    with budget.reserve("client", lambda error: None) as reservation:
        yield reservation


async def nothing_comes() -> Message:
    await sleep_forever()
    raise AssertionError("it was cancelled")


async def refuse(message: Message) -> None:
    raise AssertionError(f"nothing is to be sent, and {message} was")


class Untold:
    """A writer of which nothing is sent."""

    media_type = "text/plain"

    def keep_alive(self) -> bytes:
        return b""

    def events(self, choice: int, events: Sequence[OutputEvent]) -> bytes:
        return b""

    def kept_bytes(self, events: Sequence[OutputEvent]) -> int:
        return 0


@dataclass
class Streamed:
    """A StreamingBuilder whose events never end."""

    requests: Sequence[Request]
    engine: Endless = field(default_factory=Endless)
    meter: UsageMeter = field(default_factory=lambda: UsageMeter(1))

    def writer(self) -> Untold:
        return Untold()


async def test_a_client_that_leaves_in_the_midst_of_events_is_just_gone() -> None:
    engine, left = Endless(), asyncio.Event()
    record = RequestRecord("r", Principal("client"))
    requests = [Request(f"r{i}", (1,), 1) for i in range(8)]

    async def receive() -> Message:
        await left.wait()
        return {"type": "http.disconnect"}

    async def read_until_left() -> None:
        with reserved() as output:
            async with (
                client_waiting(receive),
                generating(engine, requests, output, record, RequestTracker()) as events,
            ):
                async for _ in events:
                    left.set()

    with pytest.raises(ClientDisconnected):
        await read_until_left()
    assert {engine.aborted.get_nowait() for _ in requests} == {r.id for r in requests}


async def test_at_the_deadline_an_error_takes_the_place_of_events_that_never_end() -> None:
    builder = Streamed([Request(f"r{i}", (1,), 1) for i in range(3)])
    endless = cast(StreamingBuilder[Any], builder)
    record = RequestRecord("r", Principal("client"), deadline=current_time() + 0.1)
    stream = streamed(endless, record, RequestTracker(), keepalive_seconds=3600)
    with reserved() as record.output, pytest.raises(ApiError) as caught:
        await stream({"state": {"record": record}}, nothing_comes, refuse)
    assert (caught.value.status, caught.value.code) == (504, "request_timeout")
    aborted = {builder.engine.aborted.get_nowait() for _ in builder.requests}
    assert aborted == {request.id for request in builder.requests}


async def test_what_is_taken_no_longer_counts() -> None:
    with reserved(2 * EVENT_BYTES) as output:
        events = MergedEvents(1, output)
        for _ in range(10):
            events.put(0, EVENT)
            await anext(events)
        events.put(0, EVENT)
        events.put(0, EVENT)
        with pytest.raises(ApiError, match=f"More than {2 * EVENT_BYTES} bytes"):
            events.put(0, EVENT)


async def test_a_failure_comes_after_the_events_that_wait() -> None:
    with reserved() as output:
        events = MergedEvents(1, output)
        events.put(0, EVENT)
        events.fail(ValueError("the engine broke"))
        assert await anext(events) == [(0, EVENT)]
        with pytest.raises(ValueError, match="the engine broke"):
            await anext(events)


async def test_waiting_in_vain_loses_no_event() -> None:
    with reserved() as output:
        events = MergedEvents(1, output)
        with move_on_after(0):
            await anext(events)
        events.put(0, EVENT)
        events.source_ended()
        assert [batch async for batch in events] == [[(0, EVENT)]]
