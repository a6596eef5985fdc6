"""The process's end of the connection: calls, and what is sent with their results."""

import asyncio
import gc
import logging
import weakref
from typing import NoReturn

from engine.api import EngineStopped, Report
from engine.core.inbox import Inbox
from engine.core.loop import Deliver
from engine.process.sockets import FrameBuffer
from engine.remote.host import Calls, EngineHost, Outbox
from engine.remote.wire import CANCEL, Kind, Message, read_frame
from engine.values.output import OutputEvent
from engine.values.settings import EngineConfig

SECONDS = 20.0


class Sent(Outbox):
    """Keeps what would be sent."""

    def __init__(self) -> None:
        self._buffer = FrameBuffer()
        self.bodies: list[bytes] = []

    def send(self, data: bytes) -> None:
        self.bodies += self._buffer.add(data)

    def kinds(self) -> list[Kind]:
        return [Kind(read_frame(body)[0]) for body in self.bodies]


class Name(str):
    """Can be looked for in memory."""


def _load(config: EngineConfig, report: Report, inbox: Inbox, deliver: Deliver) -> NoReturn:
    report("it is refused")
    deliver([OutputEvent("a", 0, text="b")])
    raise EngineStopped("no engine")


async def test_a_call_that_is_cancelled_before_it_starts_is_forgotten() -> None:
    host = EngineHost(Sent(), _load)
    name = Name("abort")
    remembered = weakref.ref(name)
    host.take(Message(1, name, b'["a"]'))
    host.take(Message(1, CANCEL))
    del name
    await _turns()
    gc.collect()
    assert remembered() is None


async def test_events_are_sent_as_they_come_and_a_call_is_answered_once() -> None:
    sent = Sent()
    host = EngineHost(sent, _load)
    host.take(Message(1, "load", Calls.load.json(EngineConfig(""), logging.WARNING)))
    async with asyncio.timeout(SECONDS):
        while Kind.RAISED not in sent.kinds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert sent.kinds() == [Kind.LINE, Kind.EVENTS, Kind.RAISED]


async def _turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_call_that_cannot_be_read_fails_alone() -> None:
    sent = Sent()
    host = EngineHost(sent, _load)
    for number, (name, json) in enumerate([("no such call", b"[]"), ("probe", b"{}")]):
        host.take(Message(number, name, json))
    await _turns()
    assert sent.kinds() == [Kind.RAISED, Kind.RAISED]
