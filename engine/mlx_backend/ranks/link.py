"""A connection between two ranks: frames either way, and the notice that a rank is lost."""

import os
import select
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Lock, Thread
from typing import NoReturn

from engine.api import ModelError
from engine.mlx_backend.ranks.plan import Frame
from engine.process.sockets import RECEIVED_BYTES, FrameBuffer, ProtocolError, framed, send_all

BEAT_SECONDS = 0.5

SILENT_SECONDS = 5.0
"""How long a rank may send nothing, not even that it runs. Only the seconds are counted in which
this process has run: a whole machine may be suspended.
"""

LOADING_SECONDS = 60.0
"""In place of `SILENT_SECONDS` while a model is loaded, when imports may keep all threads waiting
for long.
"""

_BEAT = framed(bytes([Frame.BEAT]))
_LOCAL = "127.0.0.1"


class RankLost(ModelError):
    """A rank has ended, or has sent an error."""


class RankSilent(RankLost):
    """A rank sends nothing: it was stopped from outside, or its machine is not reachable."""


class Link:
    """This rank's end of a connection to the rank that is called `name` in messages.

    `lost` is called once, on the connection's own thread, when that rank is lost. Any thread may
    send, and one thread receives.
    """

    def __init__(
        self, connection: socket.socket, name: str, lost: Callable[[RankLost], None]
    ) -> None:
        self.name = name
        self.sent_bytes = 0
        self._socket = connection
        self._socket.settimeout(LOADING_SECONDS)  # to send
        self._silent_seconds = LOADING_SECONDS
        self._lost = lost
        self._lock = Lock()
        self._received: SimpleQueue[bytes | RankLost] = SimpleQueue()
        for target in self._read, self._beat:
            Thread(target=target, name=f"link to {name}", daemon=True).start()

    def hosts(self) -> tuple[str, str]:
        """The addresses of this machine and of the other one, by which each reaches the other."""
        if self._socket.family == socket.AF_UNIX:
            return _LOCAL, _LOCAL
        return self._socket.getsockname()[0], self._socket.getpeername()[0]

    def send(self, frame: Frame, body: bytes = b"") -> None:
        """Raises RankLost."""
        data = framed(bytes([frame]) + body)
        try:
            with self._lock:
                send_all(self._socket, data)
        except OSError as error:
            raise RankLost(f"{self.name} takes no frames: {error}") from error
        self.sent_bytes += len(data)

    def receive(self) -> bytes:
        """The next frame, its kind first. Raises RankLost."""
        received = self._received.get()
        if isinstance(received, RankLost):
            raise received
        return received

    def receive_body(self, kind: Frame) -> bytes:
        """The body of the next frame, which must be of that kind. Raises RankLost."""
        frame = self.receive()
        if frame[0] != kind:
            raise RankLost(f"{self.name} sends a frame of kind {frame[0]} in place of {kind.name}")
        return frame[1:]

    def serve(self) -> None:
        """The model is loaded: from now on a silent rank is noticed within seconds."""
        self._silent_seconds = SILENT_SECONDS
        self._socket.settimeout(SILENT_SECONDS)

    def close(self) -> None:
        """End the connection. `lost` is called, unless it has been."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        lost = RankLost(f"{self.name} has ended")
        try:
            self._take_all()
        except RankLost as why:
            lost = why
        except ProtocolError as error:
            lost = RankLost(f"{self.name} sends no frames: {error}")
        except OSError:
            pass
        self._received.put(lost)
        self._lost(lost)

    def _take_all(self) -> None:
        """Queue all frames up to the end. Raises RankLost for an error that the rank has sent, and
        RankSilent.
        """
        frames = FrameBuffer()
        while data := self._receive_some():
            for body in frames.add(data):
                if body[:1] == bytes([Frame.FAILED]):
                    raise RankLost(f"{self.name}: {body[1:].decode(errors='replace')}")
                if not body:
                    raise ProtocolError("an empty frame")
                if body[0] != Frame.BEAT:
                    self._received.put(body)

    def _receive_some(self) -> bytes:
        """The next bytes; none at the end. Raises RankSilent."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        n_silent = 0
        while not poll.poll(1000 * BEAT_SECONDS):
            n_silent += 1
            if n_silent * BEAT_SECONDS >= self._silent_seconds:
                raise RankSilent(f"{self.name} has been silent for {self._silent_seconds:g} s")
        return self._socket.recv(RECEIVED_BYTES)

    def _beat(self) -> None:
        with suppress(OSError):  # the reader notices it, too
            while True:
                with self._lock:
                    send_all(self._socket, _BEAT)
                time.sleep(BEAT_SECONDS)


def end_process(status: int) -> NoReturn:
    """End this process at once: a thread of it may be in a collective that never returns."""
    os._exit(status)
