"""One grammar process as the engine thread talks to it, without blocking."""

import socket
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor, Future

from engine.grammar.remote.jobs import Job, Jobs
from engine.grammar.remote.process import START_SECONDS, GrammarProcess, patience_seconds
from engine.grammar.remote.wire import (
    Ahead,
    Answered,
    Mask,
    Message,
    Report,
    Said,
    read_report,
    request_frame,
)
from engine.process.sockets import FrameBuffer, ProtocolError, send_some

READ_BYTES = 1024**2
"""At a time, so that a process that writes without end does not block the engine thread."""


class LaneLost(Exception):
    """The process has died, is given up, or does not start. `culprit` is the job that is at fault,
    None where none is.
    """

    def __init__(self, reason: str, culprit: Job | None = None) -> None:
        super().__init__(reason)
        self.culprit = culprit


class Lane:
    """Sends jobs to one process as fast as it takes them, and reads its answers.

    The process starts with the first job, and again with the next job after it has been lost. It
    starts on a thread of the `starter`; jobs wait meanwhile. A job may take `job_seconds` of
    processor time.
    """

    def __init__(
        self,
        start_process: Callable[[], GrammarProcess],
        starter: Executor,
        job_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self.job_seconds = job_seconds
        self._starter = starter
        self._starting: Future[GrammarProcess] | None = None
        self.deaths = 0  # of its processes, in a row without an answer
        self._start_process = start_process
        self._clock = clock
        self._process: GrammarProcess | None = None
        self._outbox = bytearray()
        self._frames = FrameBuffer()
        self._jobs = Jobs()
        self._awaited = Counter[int]()  # what each matcher has been asked, and has not answered
        self._since = 0.0  # it was heard, or asked when it had nothing to do

    @property
    def connection(self) -> socket.socket | None:
        """None until the process has started."""
        return None if self._process is None else self._process.connection

    @property
    def is_held_up(self) -> bool:
        """Whether `exchange` has to be called again soon, although the process says nothing: it is
        starting, or its socket has not taken all jobs. A kernel without buffers calls a socket
        writable that takes nothing, so waiting for that would turn without end.
        """
        return self._starting is not None or bool(self._outbox)

    def post(self, job: Message) -> None:
        """Queue a job. It is sent by `exchange`, once the process has started."""
        if not self._is_open:
            self._starting = self._starter.submit(self._start_process)
        if not self._is_busy:
            self._since = self._clock()
        self._awaited[job["id"]] += 1
        self._outbox += request_frame(job)

    def close(self, number: int) -> None:
        """The matcher is asked nothing any more."""
        if self._is_open:
            del self._awaited[number]
            self._jobs.close(number)
            self._outbox += request_frame({"do": "close", "id": number})

    def exchange(self) -> list[Answered | Report]:
        """Return what the process has said, and send what it takes now. Raises LaneLost."""
        self._take_started()
        if self._process is None:
            if self._is_overdue:
                raise self.given_up("it does not start")
            return []
        peer = self._process.connection
        try:
            heard = [one for body in self._received(peer) for one in self._heard(body)]
        except ProtocolError as error:
            raise self.given_up(str(error)) from error
        self._send(peer)
        if self._is_overdue:
            raise self.given_up("it is stuck", self._jobs.running)
        return heard

    def given_up(self, reason: str, culprit: Job | None = None) -> LaneLost:
        """Kill a process that would go on. What to raise then."""
        self.stop()
        return LaneLost(reason, culprit)

    def stop(self) -> int | None:
        """Kill the process; the exit code that it had, or has now."""
        if self._starting is not None and not self._starting.cancel():
            self._starting.add_done_callback(_kill_started)
        code = None if self._process is None else self._process.kill()
        self._starting = self._process = None
        self._outbox.clear()
        self._frames = FrameBuffer()
        self._jobs = Jobs()
        self._awaited.clear()
        return code

    @property
    def _is_busy(self) -> bool:
        return bool(self._awaited) or self._jobs.running is not None

    @property
    def _is_overdue(self) -> bool:
        running = self._jobs.running
        allowed = START_SECONDS if running is None else patience_seconds(running.seconds)
        return self._is_busy and self._clock() - self._since > allowed

    @property
    def _is_open(self) -> bool:
        return self._process is not None or self._starting is not None

    def _take_started(self) -> None:
        """Take over the process if it has started by now. Raises LaneLost if it cannot start."""
        starting = self._starting
        if starting is None or not starting.done():
            return
        self._starting = None
        try:
            self._process = starting.result()
        except Exception as error:
            raise self.given_up(str(error)) from error
        self._process.connection.setblocking(False)

    def _ended(self, reason: str) -> LaneLost:
        jobs, code = self._jobs, self.stop()
        return LaneLost(f"{reason}; exit code {code}", jobs.culprit(code))

    def _send(self, peer: socket.socket) -> None:
        try:
            while self._outbox and (n_bytes := send_some(peer, self._outbox)):
                del self._outbox[:n_bytes]
        except OSError:
            self._outbox.clear()  # it has ended, as is found out when all that it said is read

    def _received(self, peer: socket.socket) -> list[bytes]:
        """Raises LaneLost at the end, and ProtocolError."""
        try:
            data = peer.recv(READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise self._ended(str(error)) from error
        if not data:
            raise self._ended("it has died")
        return self._frames.add(data)

    def _heard(self, body: bytes) -> list[Answered | Report]:
        self._since = self._clock()
        match read_report(body):
            case Report(
                Said.BEGUN,
                {
                    "id": int(number),
                    "client": str(client),
                    "seconds": float(seconds),
                    "bytes_left": int(bytes_left),
                },
            ):
                self._jobs.begin(Job(number, client, seconds, bytes_left))
                return []
            case (
                Mask(matcher=number)
                | Ahead(matcher=number)
                | Report(fields={"id": int(number)}) as answer
            ):
                self._awaited -= Counter([number])
                self._jobs.end()
                return [answer]
            case nonsense:
                return [nonsense]


def _kill_started(starting: "Future[GrammarProcess]") -> None:
    """End a process that nobody wants any more when its start is over."""
    if starting.exception() is None:
        starting.result().kill()
