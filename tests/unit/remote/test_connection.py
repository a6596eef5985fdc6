"""The server's end of the connection to an engine's process: what becomes of its calls."""

import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from engine import sockets as frames
from engine.api import EngineStopped
from engine.remote import calls, connection, messages
from engine.remote.connection import Connection, Receivers
from engine.remote.messages import Numbered
from engine.sockets import FrameBuffer, ProtocolError
from engine.values.stats import Cleared

SECONDS = 20.0
"""For what comes at once."""

CLEAR = calls.ClearCache(None, frozenset())


class Process:
    """Stands for the process: the test has the other end of the socket."""

    def __init__(self, peer: socket.socket) -> None:
        self._peer = peer
        self.killed = threading.Event()

    def wait(self, timeout: float | None = None) -> int:
        return 0

    def kill(self) -> None:
        self.killed.set()
        self._peer.shutdown(socket.SHUT_RDWR)


@dataclass(frozen=True, slots=True)
class Ends:
    """Both ends of a connection."""

    server: Connection
    process: Process
    peer: socket.socket

    def next_call(self) -> Numbered:
        """The call that the process reads next."""
        buffer, bodies = FrameBuffer(), list[bytes]()
        while not bodies:
            bodies = buffer.add(self.peer.recv(1))
        message = messages.read_to_process(bodies[0])
        assert isinstance(message, Numbered)
        return message


@pytest.fixture
def ends() -> Iterator[Ends]:
    ours, theirs = socket.socketpair()
    receivers = Receivers(lambda events: None, lambda line: None, lambda: None)
    with theirs:
        process = Process(theirs)
        server = Connection(ours, process, receivers)
        yield Ends(server, process, theirs)
        theirs.close()
        server.close()


def test_a_result_that_cannot_be_read_ends_its_call_alone(ends: Ends) -> None:
    _, unread = ends.server.send(CLEAR)
    _, later = ends.server.send(CLEAR)
    first, second = ends.next_call(), ends.next_call()
    ends.peer.sendall(messages.returned_frame(first.number, calls.ListRequests(), ()))
    cleared = Cleared(blocks=1, bytes=2)
    ends.peer.sendall(messages.returned_frame(second.number, CLEAR, cleared))
    assert unread.exception(SECONDS) is not None
    assert later.result(SECONDS) == cleared


def test_a_call_beyond_a_frame_fails_alone(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 1000)
    _, long = ends.server.send(calls.Probe(tuple(range(1000)), "", ""))
    _, short = ends.server.send(CLEAR)
    assert isinstance(long.exception(SECONDS), ProtocolError)
    cleared = Cleared(blocks=1, bytes=2)
    ends.peer.sendall(messages.returned_frame(ends.next_call().number, CLEAR, cleared))
    assert short.result(SECONDS) == cleared


def test_a_process_that_takes_no_calls_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """It still says that it is alive. Its callers would wait for ever."""
    monkeypatch.setattr(connection, "FIRST_WORD_SECONDS", 0.3)
    monkeypatch.setattr(connection, "SILENT_SECONDS", 0.3)
    ours, theirs = socket.socketpair()
    receivers = Receivers(lambda events: None, lambda line: None, lambda: None)
    with theirs:
        process = Process(theirs)
        server = Connection(ours, process, receivers)
        stop = threading.Event()
        alive = threading.Thread(target=_say_alive, args=(theirs, stop))
        alive.start()
        _, pending = server.send(calls.Probe(tuple(range(1_000_000)), "", ""))
        assert isinstance(pending.exception(SECONDS), EngineStopped)
        assert process.killed.is_set()
        stop.set()
        alive.join()
        server.close()


def _say_alive(peer: socket.socket, stop: threading.Event) -> None:
    while not stop.wait(0.05):
        try:
            peer.sendall(messages.alive_frame(True))
        except OSError:
            return
