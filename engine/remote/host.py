"""An engine's process: takes the server's calls, and sends what the engine says."""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress

from engine.api import CacheWatch, EngineError
from engine.core.thread import Build, EngineThread
from engine.remote import messages
from engine.remote.calls import Call
from engine.remote.messages import Cancel, Numbered
from engine.remote.outbox import Outbox
from engine.sockets import RECEIVED_BYTES, FrameBuffer
from engine.values.output import OutputEvent
from engine.values.settings import EngineConfig
from kvstore.tier.types import TierError

HEARTBEAT_SECONDS = 1.0

Report = Callable[[str], None]
MakeBuild = Callable[[EngineConfig, Report], Build]

logger = logging.getLogger(__name__)


class EngineHost:
    """Implements `calls.Host`. The engine thread sends events as they come."""

    engine: EngineThread
    watch: CacheWatch

    def __init__(self, outbox: Outbox, make_build: MakeBuild) -> None:
        self._outbox = outbox
        self._make_build = make_build
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._is_alive: Callable[[], bool] = lambda: True  # until there is an engine
        self.watching = AsyncExitStack()
        self.disk_seconds = 0.0

    def take(self, message: Numbered | Cancel) -> None:
        match message:
            case Numbered(number, call):
                task = self._tasks[number] = asyncio.create_task(self._run(number, call))
                # Not in `_run`: a task that is cancelled before its first step never enters it.
                task.add_done_callback(lambda _: self._tasks.pop(number))
            case Cancel(number):
                if number in self._tasks:
                    self._tasks[number].cancel()

    async def load(self, config: EngineConfig) -> None:
        self.disk_seconds = config.disk.shutdown_seconds if config.disk else 0.0
        build = self._make_build(config, self._report)
        self.engine = await asyncio.to_thread(
            EngineThread.start, build, self._deliver, self._say_ended
        )
        self._is_alive = self.engine.is_alive

    async def beat(self) -> None:
        """Say that the process lives, as long as it does."""
        while True:
            self._outbox.send(messages.alive_frame(self._is_alive()))
            await asyncio.sleep(HEARTBEAT_SECONDS)

    async def _run(self, number: int, call: Call) -> None:
        try:
            answer = messages.returned_frame(number, call, await call.run(self))
        except Exception as error:
            if not isinstance(error, EngineError | TierError):
                logger.exception("a call has failed: %s", call.call)
            answer = messages.raised_frame(number, error)
        self._outbox.send(answer)

    def _deliver(self, events: list[OutputEvent]) -> None:
        self._outbox.send(b"".join(messages.events_frames(events)))

    def _report(self, line: str) -> None:
        self._outbox.send(messages.line_frame(line))

    def _say_ended(self) -> None:
        self._outbox.send(messages.ended_frame())


async def serve(connection: socket.socket, make_build: MakeBuild) -> None:
    """Until the server closes its end, or is gone."""
    loop = asyncio.get_running_loop()
    connection.setblocking(False)
    host = EngineHost(Outbox(connection, loop), make_build)
    beating = asyncio.create_task(host.beat())
    frames = FrameBuffer()
    with suppress(ConnectionError):
        while data := await loop.sock_recv(connection, RECEIVED_BYTES):
            for body in frames.add(data):
                host.take(messages.read_to_process(body))
    beating.cancel()


def main(descriptor: int, make_build: MakeBuild) -> None:
    """All that a process does which has been started for an engine."""
    for ignored in (signal.SIGINT, signal.SIGTERM):  # the server's to handle: it says when
        signal.signal(ignored, signal.SIG_IGN)
    try:
        asyncio.run(serve(socket.socket(fileno=descriptor), make_build))
    finally:
        logging.shutdown()
        os._exit(0)  # at once: the server waits for the memory, or is gone
