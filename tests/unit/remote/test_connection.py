"""The server's end of the connection to an engine's process: what becomes of its calls."""

import asyncio
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import pytest

from engine.api import EngineStopped
from engine.process import sockets as frames
from engine.process.sockets import FrameBuffer, ProtocolError
from engine.remote import connection, wire
from engine.remote.calls import CALLS, Calls
from engine.remote.connection import Connection
from engine.remote.wire import CallMessage, Kind
from engine.values.stats import CacheTier, Cleared
from engine.values.tokens import pack

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

    def next_call(self) -> CallMessage:
        """The call that the process reads next."""
        buffer, bodies = FrameBuffer(), list[bytes]()
        while not bodies:
            bodies = buffer.add(self.peer.recv(1))
        return CallMessage.read(bodies[0])

    def clear(self) -> tuple[int, Future[Cleared]]:
        """Send a call."""
        return self.server.send(Calls.clear_cache, None, frozenset[CacheTier]())

    def answer(self, message: CallMessage, result: object) -> None:
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
    _, long = ends.server.send(Calls.probe, pack(range(1000)), "", "")
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
        _, pending = server.send(Calls.probe, pack(range(1_000_000)), "", "")
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


def test_the_end_does_not_wait_for_a_call_that_nobody_reads(ends: Ends) -> None:
    _, unread = ends.server.send(Calls.probe, pack(range(1_000_000)), "", "")
    ends.peer.recv(1)
    ends.peer.shutdown(socket.SHUT_WR)
    assert isinstance(unread.exception(SECONDS), EngineStopped)
    assert ended(ends.server)


def test_a_writer_that_fails_ends_the_connection(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or callers would wait for answers to calls that were never sent."""

    def fails(*arguments: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(connection, "send_all", fails)
        patch.setattr(threading, "excepthook", lambda arguments: None)
        ends.peer.settimeout(SECONDS)
        _, unsent = ends.clear()
        assert ends.peer.recv(1) == b"", "it ends the process"
        ends.peer.shutdown(socket.SHUT_WR)
        assert isinstance(unsent.exception(SECONDS), EngineStopped)
        assert ended(ends.server)


def test_a_call_is_resolved_once_however_its_cancellation_and_the_end_interleave() -> None:
    """The call is cancelled in steps: it pauses before one of its bytecodes while the connection
    ends, and goes on while the first of the other calls is failed.
    """
    n_steps, is_paused = 0, True
    while is_paused:
        ours, theirs = socket.socketpair()
        with theirs:
            server = connected(ours, Process(theirs))
            calls = [server.send(Calls.clear_cache, None, frozenset[CacheTier]()) for _ in range(3)]
            cancelling = Stepped(partial(server.cancel, calls[1][0]), n_steps)
            calls[0][1].add_done_callback(cancelling.finish)
            cancelling.start()
            assert cancelling.is_paused_or_done.wait(SECONDS)
            is_paused = cancelling.is_alive()
            theirs.close()
            if not cancelling.goes_on.wait(0.02):  # it may have the lock
                cancelling.goes_on.set()
            assert ended(server), f"paused before bytecode {n_steps}"
            for _, future in (calls[0], calls[2]):
                assert isinstance(future.exception(SECONDS), EngineStopped)
            cancelling.join(SECONDS)
            with pytest.raises(EngineStopped):
                server.send(Calls.clear_cache, None, frozenset[CacheTier]())
            server.close()
        n_steps += 1
    assert n_steps > 10


class Stepped(threading.Thread):
    """Calls a function; pauses before the `n_steps`-th bytecode that it runs in `connection`."""

    def __init__(self, function: Callable[[], None], n_steps: int) -> None:
        super().__init__(daemon=True)
        self._function = function
        self._steps_left = n_steps
        self.is_paused_or_done, self.goes_on = threading.Event(), threading.Event()

    def run(self) -> None:
        sys.settrace(self._trace)
        try:
            self._function()
        finally:
            sys.settrace(None)
            self.is_paused_or_done.set()

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename != connection.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            if self._steps_left == 0:
                self.is_paused_or_done.set()
                self.goes_on.wait(SECONDS)
            self._steps_left -= 1
        return self._trace

    def finish(self, _: object) -> None:
        """Let it go on, and wait until it has ended."""
        self.goes_on.set()
        self.join(SECONDS)


def ended(server: Connection) -> str:
    """Why the connection has ended, which it does soon."""
    return asyncio.run(asyncio.wait_for(server.ended(), SECONDS))


def _say_alive(peer: socket.socket, stop: threading.Event) -> None:
    while not stop.wait(0.05):
        try:
            peer.sendall(wire.frame(Kind.ALIVE, wire.ALIVE.dump_json(True)))
        except OSError:
            return
