"""One grammar process as the engine thread talks to it: nothing here waits."""

import select
import socket
from collections.abc import Callable

from engine.constraints.remote.process import GrammarProcess
from engine.constraints.remote.wire import (
    FrameBuffer,
    Mask,
    ProtocolError,
    Report,
    Said,
    read_report,
)

READ_BYTES = 1024**2
"""At a time: who never ends what he says keeps nobody from what comes next."""


class LaneLost(Exception):
    """The process has died, does not start, or makes no sense."""


class Lane:
    """What is posted leaves as fast as the process takes it. Starts with the first post.

    `running` is the job that the process does, by its number, and `since` when that was noticed.
    """

    def __init__(
        self, start_process: Callable[[], GrammarProcess], clock: Callable[[], float]
    ) -> None:
        self._start_process = start_process
        self._clock = clock
        self._process: GrammarProcess | None = None
        self._outbox = bytearray()
        self._frames = FrameBuffer()
        self.running: int | None = None
        self.since = 0.0
        self.deaths = 0  # of its processes, in a row without an answer

    @property
    def connection(self) -> socket.socket | None:
        """None before the start."""
        return None if self._process is None else self._process.connection

    @property
    def interest(self) -> int:
        """What of its socket is to be waited for, as `select.poll` has it."""
        return select.POLLIN | (select.POLLOUT if self._outbox else 0)

    def post(self, frame: bytes) -> None:
        """Raises LaneLost where no process can be started."""
        if self._process is None:
            self._start()
        self._outbox += frame

    def exchange(self) -> list[Mask | Report]:
        """Return what the process has said, and send what it takes now. Raises LaneLost."""
        if self._process is None:
            return []
        peer = self._process.connection
        try:
            heard = [one for body in self._received(peer) for one in self._heard(body)]
        except ProtocolError as error:
            raise LaneLost(str(error)) from error
        self._send(peer)
        return heard

    def stop(self) -> int | None:
        """Kill the process; the exit code that it had, or has now. The next post starts another."""
        code = None if self._process is None else self._process.kill()
        self._process = None
        self._outbox.clear()
        self._frames = FrameBuffer()
        self.running = None
        return code

    def _start(self) -> None:
        try:
            self._process = self._start_process()
        except OSError as error:
            raise LaneLost(str(error)) from error
        self._process.connection.setblocking(False)

    def _send(self, peer: socket.socket) -> None:
        try:
            while self._outbox:
                del self._outbox[: peer.send(self._outbox)]
        except BlockingIOError:
            return
        except OSError:
            self._outbox.clear()  # it has ended, as is found out when all that it said is read

    def _received(self, peer: socket.socket) -> list[bytes]:
        """Raises LaneLost at the end, and ProtocolError."""
        try:
            data = peer.recv(READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise LaneLost(str(error)) from error
        if not data:
            raise LaneLost("the process has ended")
        return self._frames.add(data)

    def _heard(self, body: bytes) -> list[Mask | Report]:
        match read_report(body):
            case Report(Said.BEGUN, {"id": int(number)}):
                self.running, self.since = number, self._clock()
                return []
            case report:
                self.running = None
                return [report]
