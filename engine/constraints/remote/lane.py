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


class LaneLost(Exception):
    """The process has died, or makes no sense."""


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
        self._is_over = False  # it has ended, and what it has said last is being read
        self.running: int | None = None
        self.since = 0.0

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
        if self._is_over:
            raise LaneLost("the process has ended")
        peer = self._process.connection
        try:
            heard = [one for body in self._received(peer) for one in self._heard(body)]
        except ProtocolError as error:
            raise LaneLost(str(error)) from error
        self._send(peer)
        return heard

    def stop(self) -> None:
        """Kill the process. The next post starts another."""
        if self._process is not None:
            self._process.kill()
        self._process = None
        self._outbox.clear()
        self._frames = FrameBuffer()
        self.running = None
        self._is_over = False

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
            self._is_over = True  # what it has said before is read first

    def _received(self, peer: socket.socket) -> list[bytes]:
        bodies: list[bytes] = []
        try:
            while data := peer.recv(READ_BYTES):
                bodies += self._frames.add(data)
        except BlockingIOError:
            return bodies
        except OSError:
            pass
        self._is_over = True
        return bodies

    def _heard(self, body: bytes) -> list[Mask | Report]:
        report = read_report(body)
        if isinstance(report, Report) and report.said is Said.BEGUN:
            self.running, self.since = report.fields["id"], self._clock()
            return []
        self.running = None
        return [report]
