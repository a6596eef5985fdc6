"""The process's end of the connection: calls, what is sent with their results, how it arrives."""

import asyncio
import errno
import gc
import logging
import socket
import weakref
from collections.abc import Callable
from inspect import signature
from typing import NoReturn, cast

from engine.api import EngineStopped, Report
from engine.core.loop import Deliver
from engine.encoders.thread import EncoderThread
from engine.process.sockets import FrameBuffer
from engine.remote.calls import CALLS, Calls
from engine.remote.host import EngineHost, Hosted, Outbox, start_and_freeze
from engine.remote.wire import CANCEL, CallMessage, Kind, read_frame
from engine.thread import EngineThread
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


def _start(
    config: EngineConfig, report: Report, deliver: Deliver, ended: Callable[[], None]
) -> NoReturn:
    report("it is refused")
    deliver([OutputEvent("a", 0, text="b")])
    raise EngineStopped("no engine")


async def test_a_call_that_is_cancelled_before_it_starts_is_forgotten() -> None:
    host = EngineHost(Sent(), _start)
    name = Name("abort")
    remembered = weakref.ref(name)
    host.take(CallMessage(1, name, b'["a"]'))
    host.take(CallMessage(1, CANCEL))
    del name
    await _turns()
    gc.collect()
    assert remembered() is None


async def test_events_are_sent_as_they_come_and_a_call_is_answered_once() -> None:
    sent = Sent()
    host = EngineHost(sent, _start)
    host.take(CallMessage(1, "load", Calls.load.json(EngineConfig(""), logging.WARNING)))
    async with asyncio.timeout(SECONDS):
        while Kind.RAISED not in sent.kinds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert sent.kinds() == [Kind.LINE, Kind.EVENTS, Kind.RAISED]


async def _turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_call_that_cannot_be_read_fails_alone() -> None:
    sent = Sent()
    host = EngineHost(sent, _start)
    for number, (name, json) in enumerate([("no such call", b"[]"), ("probe", b"{}")]):
        host.take(CallMessage(number, name, json))
    await _turns()
    assert sent.kinds() == [Kind.RAISED, Kind.RAISED]


class WithoutBuffers:
    """A socket whose kernel has no buffers every other time."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._n_calls = 0

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, data: bytes) -> int:
        self._n_calls += 1
        if self._n_calls % 2:
            raise OSError(errno.ENOBUFS, "No buffer space available")
        return self._connection.send(data[:1000])


async def test_a_kernel_without_buffers_drops_nothing() -> None:
    ours, theirs = socket.socketpair()
    loop = asyncio.get_running_loop()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        outbox = Outbox(cast(socket.socket, WithoutBuffers(ours)), loop)
        data = bytes(range(256)) * 40
        outbox.send(data[:5000])
        outbox.send(data[5000:])
        received = b""
        while len(received) < len(data):
            received += await loop.sock_recv(theirs, 4096)
        assert received == data


def test_what_is_sent_after_the_end_of_the_event_loop_is_dropped() -> None:
    """The process ends then, while the engine's thread may still send events."""
    ours, theirs = socket.socketpair()
    loop = asyncio.new_event_loop()
    loop.close()
    with ours, theirs:
        ours.setblocking(False)
        Outbox(ours, loop).send(bytes(1 << 22))


def test_the_process_has_the_calls_of_the_table() -> None:
    """With the same parameters and results."""
    for name, call in CALLS.items():
        for engine in (EngineThread, EncoderThread):
            method = getattr(EngineHost if name == "load" else engine, name)
            assert signature(method) == call.signature, (engine, name)


def test_what_a_model_has_loaded_is_not_collected_again() -> None:
    engine = cast(Hosted, [[number] for number in range(1000)])

    def start(
        config: EngineConfig, report: Report, deliver: Deliver, ended: Callable[[], None]
    ) -> Hosted:
        return engine

    before = gc.get_freeze_count()
    try:
        assert start_and_freeze(start, EngineConfig(model=""), print, print, print) is engine
        assert gc.get_freeze_count() >= before + 1000
    finally:
        gc.unfreeze()
