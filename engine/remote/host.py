"""An engine's process: runs the server's calls, and sends their results and the events.

`engine.remote.calls` has the table of calls. A new call is a coroutine method of `EngineThread` and
of `EncoderThread`, and a line in the table.
"""

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeAlias

from engine.api import EngineError, Report
from engine.core.loop import Deliver
from engine.encoders.thread import EncoderThread
from engine.process.sockets import (
    RECEIVED_BYTES,
    RETRY_SECONDS,
    SWITCH_SECONDS,
    FrameBuffer,
    send_some,
)
from engine.remote import wire
from engine.remote.calls import CALLS
from engine.remote.wire import CANCEL, CallMessage, Kind
from engine.thread import EngineThread
from engine.values.log_lines import LogFormatter
from engine.values.model import ModelCard
from engine.values.output import OutputEvent
from engine.values.settings import EngineConfig
from kvstore.disk.types import DiskError

HEARTBEAT_SECONDS = 1.0

Hosted: TypeAlias = EngineThread | EncoderThread
"""An engine in this process: the thread that runs a model, with the server's calls."""

Start: TypeAlias = Callable[[EngineConfig, Report, Deliver, Callable[[], None]], Hosted]
"""Loads a model and starts its engine, which calls `Deliver` with events, and the last function
when it has ended. Its errors have a message for the user.
"""

logger = logging.getLogger(__name__)


class Outbox:
    """Sends bytes through a socket from several threads without blocking any of them.

    It sends as much as the socket accepts at once, and the rest from the event loop.
    """

    def __init__(self, connection: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        self._socket = connection
        self._loop = loop
        self._unsent = bytearray()
        self._lock = threading.Lock()

    def send(self, data: bytes) -> None:
        """Send from any thread, in the order of the calls. Never raises: the task that reads from
        the socket notices when the other end has closed.
        """
        with self._lock:
            if not self._unsent:
                data = data[self._sent(data) :]
                if data:
                    with suppress(RuntimeError):  # the event loop is closed: the process ends
                        self._loop.call_soon_threadsafe(self._wait)
            self._unsent += data

    def _wait(self) -> None:
        self._loop.add_writer(self._socket, self._send_rest)

    def _send_rest(self) -> None:
        with self._lock:
            n_bytes = self._sent(self._unsent)
            del self._unsent[:n_bytes]
            if not self._unsent:
                self._loop.remove_writer(self._socket)
            elif not n_bytes:  # writable, but the kernel has no buffers: try again, but do not spin
                self._loop.remove_writer(self._socket)
                self._loop.call_later(RETRY_SECONDS, self._wait)

    def _sent(self, data: bytes | bytearray) -> int:
        try:
            return send_some(self._socket, data)
        except OSError:
            return len(data)


class EngineHost:
    """Runs the server's calls and answers them. The engine thread sends events as they come."""

    def __init__(self, outbox: Outbox, start: Start) -> None:
        self._outbox = outbox
        self._start = start
        self._engine: Hosted | None = None  # until `load` has returned
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def load(self, config: EngineConfig, log_level: int) -> ModelCard:
        """The first call, and the only one of this object: all others are for the engine that it
        starts. Sends lines on its progress. Raises what loading raises.
        """
        handler = logging.StreamHandler()
        handler.setFormatter(LogFormatter())
        logging.basicConfig(level=log_level, handlers=[handler])
        ended = partial(self._send, Kind.ENDED)
        self._engine = await asyncio.to_thread(
            self._start, config, self._report, self._deliver, ended
        )
        return self._engine.card

    def take(self, message: CallMessage) -> None:
        """Start the call of a message, or cancel it."""
        number = message.number
        if message.name != CANCEL:
            task = self._tasks[number] = asyncio.create_task(self._run(message))
            # Not in `_run`: a task that is cancelled before its first step never enters it.
            task.add_done_callback(lambda _: self._tasks.pop(number))
        elif number in self._tasks:
            self._tasks[number].cancel()

    async def beat(self) -> None:
        """Report at regular intervals that the process runs, and whether its engine is alive."""
        while True:
            is_alive = self._engine is None or self._engine.is_alive()
            self._send(Kind.ALIVE, wire.ALIVE.dump_json(is_alive))
            await asyncio.sleep(HEARTBEAT_SECONDS)

    async def _run(self, message: CallMessage) -> None:
        try:
            call = CALLS[message.name]
            method = getattr(self if self._engine is None else self._engine, call.name)
            result = await method(*call.arguments.validate_json(message.json))
            answer = wire.frame(Kind.RETURNED, call.result.dump_json(result), message.number)
        except Exception as error:
            if not isinstance(error, EngineError | DiskError):
                logger.exception("a call has failed: %s", message.name)
            raised = wire.RAISED.dump_json(wire.Raised.of(error))
            answer = wire.frame(Kind.RAISED, raised, message.number)
        self._outbox.send(answer)

    def _deliver(self, events: list[OutputEvent]) -> None:
        self._outbox.send(b"".join(wire.events_frames(events)))

    def _report(self, line: str) -> None:
        self._send(Kind.LINE, wire.LINE.dump_json(line))

    def _send(self, kind: Kind, json: bytes = b"") -> None:
        self._outbox.send(wire.frame(kind, json))


async def serve(connection: socket.socket, start: Start) -> None:
    """Run calls until the server closes its end of the connection, or has ended."""
    loop = asyncio.get_running_loop()
    connection.setblocking(False)
    host = EngineHost(Outbox(connection, loop), start)
    beating = asyncio.create_task(host.beat())
    frames = FrameBuffer()
    with suppress(ConnectionError):
        while data := await loop.sock_recv(connection, RECEIVED_BYTES):
            for body in frames.add(data):
                host.take(CallMessage.read(body))
    beating.cancel()


def main(descriptor: int, start: Start) -> None:
    """Run an engine's process: `descriptor` is its end of the connection. Never returns."""
    for ignored in (signal.SIGINT, signal.SIGTERM):  # the server handles them, and sends `drain`
        signal.signal(ignored, signal.SIG_IGN)
    sys.setswitchinterval(SWITCH_SECONDS)
    frozen = partial(start_and_freeze, start)
    asyncio.run(_serve_and_exit(socket.socket(fileno=descriptor), frozen))


def start_and_freeze(
    start: Start,
    config: EngineConfig,
    report: Report,
    deliver: Deliver,
    ended: Callable[[], None],
) -> Hosted:
    """Start an engine, and exempt all objects that there are then from garbage collection. They
    live to the end, and a full collection of them would stop every thread for tens of milliseconds.
    """
    engine = start(config, report, deliver, ended)
    gc.collect()
    gc.freeze()
    return engine


async def _serve_and_exit(connection: socket.socket, start: Start) -> None:
    """Serve, and end the process at once when the connection ends. No thread is waited for: one may
    be loading a model or hold a lock, and the next engine needs the memory.
    """
    try:
        await serve(connection, start)
    except BaseException:  # a frame cannot be read
        logger.critical("the engine's process ends", exc_info=True)
        os._exit(1)
    os._exit(0)
