"""A request's deadline, whatever it waits for."""

import math

import pytest
from anyio import current_effective_deadline, current_time
from starlette.types import Message, Receive, Scope, Send

from server.errors import ApiError
from server.gateway import TimeLimit
from server.record import RequestRecord, request_record
from server.workers import LARGE_BYTES, Workers

START: Message = {"type": "http.response.start", "status": 200, "headers": []}


async def nothing_comes() -> Message:
    raise AssertionError("nobody asks for it")


async def answered(app: TimeLimit, record: RequestRecord) -> list[Message]:
    """What is sent. Raises what the application does."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async with record.held:
        await app({"type": "http", "state": {"record": record}}, nothing_comes, send)
    return sent


async def is_timed_out(app: TimeLimit, record: RequestRecord) -> bool:
    with pytest.raises(ApiError) as caught:
        await answered(app, record)
    return (caught.value.status, caught.value.code) == (504, "request_timeout")


def large(name: str, deadline: float) -> RequestRecord:
    return RequestRecord(name, name, deadline, n_bytes=LARGE_BYTES + 1)


async def test_who_waits_for_its_turn_leaves_the_line() -> None:
    workers, made = Workers(), list[str]()

    async def prepare(scope: Scope, receive: Receive, send: Send) -> None:
        record = request_record(scope)
        await workers.prepare(record, lambda: made.append(record.id))
        await send(START)

    first, app = large("first", math.inf), TimeLimit(prepare)
    async with first.held:
        await workers.prepare(first, lambda: made.append("first"))
        assert await is_timed_out(app, large("late", current_time()))
    assert await answered(app, large("next", math.inf)) == [START]
    assert made == ["first", "next"]


async def test_what_is_ready_too_late_is_not_sent() -> None:
    """A thread is not ended: its request may be late without having waited since."""

    async def at_once(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)

    assert await is_timed_out(TimeLimit(at_once), RequestRecord("r", "c", current_time()))


async def test_an_answer_that_has_begun_ends_in_its_own_way() -> None:
    deadlines = list[float]()

    async def begins(scope: Scope, receive: Receive, send: Send) -> None:
        deadlines.append(current_effective_deadline())
        await send(START)
        deadlines.append(current_effective_deadline())

    deadline = current_time() + 3600
    assert await answered(TimeLimit(begins), RequestRecord("r", "c", deadline)) == [START]
    assert deadlines == [deadline, math.inf]
