"""A grammar process that a test speaks for, over a real pair of sockets."""

import signal
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from typing import Any

from engine.grammar.remote.process import GrammarProcess
from engine.grammar.remote.wire import (
    Ahead,
    Mask,
    Message,
    Said,
    ahead_frame,
    mask_frame,
    read_request,
    report_frame,
)
from engine.process.sockets import FrameBuffer

LIMIT = -signal.SIGPROF
OUTSIDE = -signal.SIGKILL
MEMORY = 1000
SECONDS = 60.0


class ScriptedProcess(GrammarProcess):
    """`peer` is its end."""

    def __init__(self) -> None:
        self.connection, self.peer = socket.socketpair()
        self.peer.settimeout(SECONDS)
        self._frames = FrameBuffer()
        self._exit_code = OUTSIDE
        self.is_over = False

    @property
    def is_running(self) -> bool:
        return not self.is_over

    def end(self) -> int:
        return self.kill()

    def kill(self) -> int:
        self.connection.close()
        self.peer.close()
        self.is_over = True
        return self._exit_code

    def die(self, exit_code: int = LIMIT) -> None:
        """What it has said can still be read."""
        self.is_over = True
        self._exit_code = exit_code
        self.peer.close()

    def asked(self) -> list[Message]:
        """What it has been told since the last time."""
        self.peer.setblocking(False)
        bodies: list[bytes] = []
        with suppress(BlockingIOError):
            while data := self.peer.recv(1 << 20):
                bodies += self._frames.add(data)
        return [read_request(body) for body in bodies]

    def heard(self) -> Message:
        """The next that it is told; waits for it."""
        bodies: list[bytes] = []
        while not bodies:
            bodies = self._frames.add(self.peer.recv(1 << 20))
        return read_request(bodies[0])

    def begin(self, job: Message, bytes_left: int = MEMORY) -> None:
        said = {"id": job["id"], "client": job["client"], "seconds": job["seconds"]}
        self.peer.sendall(report_frame(Said.BEGUN, {**said, "bytes_left": bytes_left}))

    def mask(
        self,
        number: int,
        n_tokens: int,
        bits: bytes,
        seconds: float = 0.001,
        forced: tuple[int, ...] = (),
    ) -> None:
        self.peer.sendall(mask_frame(Mask(number, n_tokens, seconds, forced, bits)))

    def ahead(
        self, job: Message, bits: bytes, seconds: float = 0.001, *, is_complete: bool = False
    ) -> None:
        """Answer what was asked along a draft."""
        said = Ahead(job["id"], job["question"], seconds, is_complete, bits)
        self.peer.sendall(ahead_frame(said))

    def report(self, said: Said, **fields: object) -> None:
        self.peer.sendall(report_frame(said, fields))


class SameThread(Executor):
    """Runs what is submitted at once, so that a test knows when it is done."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class Starts:
    """Starts scripted processes, as long as it may."""

    def __init__(self) -> None:
        self.started: list[ScriptedProcess] = []
        self.is_possible = True
        self._changed = threading.Condition()

    def __call__(self) -> GrammarProcess:
        if not self.is_possible:
            raise OSError("no more processes")
        with self._changed:
            self.started.append(ScriptedProcess())
            self._changed.notify_all()
        return self.started[-1]

    def wait_for(self, number: int) -> ScriptedProcess:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.started) > number, SECONDS)
        return self.started[number]

    @property
    def last(self) -> ScriptedProcess:
        return self.started[-1]

    def close(self) -> None:
        for process in self.started:
            process.kill()
