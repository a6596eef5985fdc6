"""The server's end of the connection to an engine's process: what becomes of its calls."""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import pytest

from engine.api import EngineStopped
from engine.process import sockets as frames
from engine.process.sockets import FrameBuffer, ProtocolError
from engine.remote import connection, wire
from engine.remote.connection import Connection
from engine.remote.host import CALLS, Calls
from engine.remote.wire import Kind, Message
from engine.values.stats import CacheTier, Cleared

SECONDS = 20.0
"""For what comes at once."""


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

    def next_call(self) -> Message:
        """The call that the process reads next."""
        buffer, bodies = FrameBuffer(), list[bytes]()
        while not bodies:
            bodies = buffer.add(self.peer.recv(1))
        return Message.read(bodies[0])

    def clear(self) -> tuple[int, Future[Cleared]]:
        """Send a call."""
        return self.server.send(Calls.clear_cache, None, frozenset[CacheTier]())

    def answer(self, message: Message, result: object) -> None:
        """Return the result of a call, as the process does."""
        json = CALLS[message.name].result.dump_json(result)
        self.peer.sendall(wire.frame(Kind.RETURNED, json, message.number))


def connected(ours: socket.socket, process: Process) -> Connection:
    """A connection whose events nobody takes."""
    return Connection(ours, process, lambda events: None, lambda line: None, lambda: None)


@pytest.fixture
def ends() -> Iterator[Ends]:
    ours, theirs = socket.socketpair()
    with theirs:
        process = Process(theirs)
        server = connected(ours, process)
        yield Ends(server, process, theirs)
        theirs.close()
        server.close()


def test_a_result_that_cannot_be_read_ends_its_call_alone(ends: Ends) -> None:
    _, unread = ends.clear()
    _, later = ends.clear()
    first, second = ends.next_call(), ends.next_call()
    ends.peer.sendall(wire.frame(Kind.RETURNED, b"[]", first.number))
    cleared = Cleared(blocks=1, bytes=2)
    ends.answer(second, cleared)
    assert unread.exception(SECONDS) is not None
    assert later.result(SECONDS) == cleared


def test_a_call_beyond_a_frame_fails_alone(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 1000)
    _, long = ends.server.send(Calls.probe, tuple(range(1000)), "", "")
    _, short = ends.clear()
    assert isinstance(long.exception(SECONDS), ProtocolError)
    cleared = Cleared(blocks=1, bytes=2)
    ends.answer(ends.next_call(), cleared)
    assert short.result(SECONDS) == cleared


def test_a_process_that_takes_no_calls_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """It still says that it is alive. Its callers would wait for ever."""
    monkeypatch.setattr(connection, "FIRST_FRAME_SECONDS", 0.3)
    monkeypatch.setattr(connection, "SILENT_SECONDS", 0.3)
    ours, theirs = socket.socketpair()
    with theirs:
        process = Process(theirs)
        server = connected(ours, process)
        stop = threading.Event()
        alive = threading.Thread(target=_say_alive, args=(theirs, stop))
        alive.start()
        _, pending = server.send(Calls.probe, tuple(range(1_000_000)), "", "")
        assert isinstance(pending.exception(SECONDS), EngineStopped)
        assert process.killed.is_set()
        stop.set()
        alive.join()
        server.close()


def test_a_process_that_was_stopped_together_with_the_server_is_not_ended(
    monkeypatch: pytest.MonkeyPatch, ends: Ends
) -> None:
    """Nothing has come for too long when both go on; then the process is heard again."""
    monkeypatch.setattr(connection, "SILENT_SECONDS", 0.1)
    ends.peer.sendall(wire.frame(Kind.ALIVE, wire.ALIVE.dump_json(True)))
    _, pending = ends.clear()
    call = ends.next_call()
    assert not ends.process.killed.wait(0.5)
    cleared = Cleared(blocks=1, bytes=2)
    ends.answer(call, cleared)
    assert pending.result(SECONDS) == cleared
    assert not ends.process.killed.is_set()


def _say_alive(peer: socket.socket, stop: threading.Event) -> None:
    while not stop.wait(0.05):
        try:
            peer.sendall(wire.frame(Kind.ALIVE, wire.ALIVE.dump_json(True)))
        except OSError:
            return
