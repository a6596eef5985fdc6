"""The process's end of the connection: calls, and what is sent with their results."""

import asyncio
import gc
import weakref
from collections.abc import Callable
from typing import NoReturn

import pytest

from engine.api import EngineStopped
from engine.core.thread import Build
from engine.remote import calls
from engine.remote.host import EngineHost
from engine.remote.messages import Cancel, Numbered, Said
from engine.remote.outbox import Outbox
from engine.sockets import FrameBuffer
from engine.values.output import OutputEvent
from engine.values.settings import EngineConfig
from engine.values.stats import EngineStats


class Sent(Outbox):
    """Keeps what would be sent."""

    def __init__(self) -> None:
        self._buffer = FrameBuffer()
        self.bodies: list[bytes] = []

    def send(self, data: bytes) -> None:
        self.bodies += self._buffer.add(data)

    def kinds(self) -> list[Said]:
        return [Said(body[0]) for body in self.bodies]


class Sum(calls.Stats):
    """A call whose answer is an error, and which can be looked for in memory."""

    async def run(self, host: calls.Host) -> EngineStats:
        raise EngineStopped("no engine")


def _make_build(config: EngineConfig, report: object) -> Build:
    return _refuse


def _refuse(inbox: object, deliver: Callable[[list[OutputEvent]], None]) -> NoReturn:
    deliver([OutputEvent("a", 0, text="b")])
    raise EngineStopped("no engine")


async def test_a_call_that_is_cancelled_before_it_starts_is_forgotten() -> None:
    host = EngineHost(Sent(), _make_build)
    call = Sum()
    remembered = weakref.ref(call)
    host.take(Numbered(1, call))
    host.take(Cancel(1))
    del call
    await _turns()
    gc.collect()
    assert remembered() is None


async def test_events_are_sent_as_they_come_and_a_call_is_answered_once() -> None:
    sent = Sent()
    host = EngineHost(sent, _make_build)
    with pytest.raises(EngineStopped):
        await host.load(EngineConfig(""))
    assert sent.kinds() == [Said.EVENTS]
    host.take(Numbered(1, Sum()))
    await _turns()
    assert sent.kinds() == [Said.EVENTS, Said.RAISED]


async def _turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)
