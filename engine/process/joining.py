"""How ranks of other machines join rank 0: it listens until all have proved the key. A rank joins
again and again, and runs the process that computes once rank 0 has something to send.
"""

import logging
import select
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from typing import NamedTuple

from engine.api import ModelError, Report
from engine.process.child import ending, start_child
from engine.process.handshake import HandshakeError, Role, shake_hands

CONNECT_SECONDS = 10.0
"""How long a rank waits for rank 0's machine to accept a connection."""

END_SECONDS = 5.0
"""How long a rank's process may take to end after the connection to rank 0 has."""

FIRST_PAUSE_SECONDS, MOST_PAUSE_SECONDS = 1.0, 10.0
"""Between two attempts to join: doubled each time, until the model has been loaded."""

LOADED = b"\1"
"""What a rank's process sends to the process that has started it, when the model is loaded."""

RANK_MODULE = "engine.mlx_backend.rank"

_HANDSHAKES_AT_ONCE = 8
_POLL_SECONDS = 0.1
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPALIVE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Seconds, and a number, by which a connection ends whose other machine is gone. Of the first two,
Linux has one and macOS the other.
"""

_HANGUP = getattr(select, "POLLRDHUP", select.POLLHUP)
"""The event of a connection that the other end has closed, whatever is still to be read."""

logger = logging.getLogger(__name__)


class Address(NamedTuple):
    """Where rank 0 listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class _Proved(NamedTuple):
    """The end of a handshake: why it has failed; "" if it has not."""

    connection: socket.socket
    host: str
    problem: str


def await_ranks(address: Address, key: bytes, n_ranks: int, report: Report) -> list[socket.socket]:
    """Listen until all ranks but rank 0 have joined: the connections to them, in order. `report`
    gets which ranks are missing. A rank that leaves while others are awaited is awaited again.
    Raises ModelError where this machine cannot listen at the address.
    """
    try:
        listener = socket.create_server(address, backlog=64)
    except OSError as error:
        problem = f"ranks_listen: cannot listen at {address}: {error.strerror}"
        raise ModelError(problem) from error
    listener.settimeout(0.0)
    joined, proving = list[socket.socket](), set[socket.socket]()
    proved = SimpleQueue[_Proved]()
    reported: list[int] | None = None
    with listener:
        while len(joined) < n_ranks - 1:
            missing = [*range(len(joined) + 1, n_ranks)]
            if missing != reported:
                report(_waiting_text(missing, address))
                reported = missing
            if len(proving) < _HANDSHAKES_AT_ONCE and (accepted := _accept(listener)) is not None:
                proving.add(accepted[0])
                Thread(target=_prove, args=(*accepted, key, proved), daemon=True).start()
            with suppress(Empty):
                end = proved.get(timeout=_POLL_SECONDS)
                proving.remove(end.connection)
                if end.problem:
                    logger.warning("refused a rank at %s: %s", end.host, end.problem)
                    end.connection.close()
                else:
                    joined.append(end.connection)
            for left in filter(_has_ended, joined):
                left.close()
            joined = [each for each in joined if each.fileno() >= 0]
    for late in proving:
        with suppress(OSError):
            late.shutdown(socket.SHUT_RDWR)  # its handshake ends
    for _ in range(len(proving)):
        proved.get().connection.close()
    return joined


def _waiting_text(missing: list[int], address: Address) -> str:
    *others, last = map(str, missing)
    if not others:
        return f"rank {last} has not joined: waiting for it at {address}"
    return f"ranks {', '.join(others)} and {last} have not joined: waiting for them at {address}"


def _accept(listener: socket.socket) -> tuple[socket.socket, str] | None:
    """The next connection, and the address of the other machine; None if there is none now."""
    try:
        connection, (host, *_) = listener.accept()
    except OSError:  # none is there, or its other end is gone
        return None
    _prepare(connection)
    return connection, host


def _prove(
    connection: socket.socket, host: str, key: bytes, proved: "SimpleQueue[_Proved]"
) -> None:
    problem = ""
    try:
        shake_hands(connection, key, Role.LISTENER)
    except HandshakeError as error:
        problem = str(error)
    proved.put(_Proved(connection, host, problem))


def _has_ended(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _prepare(connection: socket.socket) -> None:
    """Send small frames at once, and notice a machine that is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if (option := getattr(socket, name, None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


class Ended(NamedTuple):
    """Why a rank computes no more, in words, and whether it had loaded the model."""

    why: str
    has_loaded: bool = False


def join(checkpoint: str, address: Address, key: bytes, report: Report) -> Ended:
    """Join rank 0, which is on another machine, and compute a part of its model until either ends.
    `report` gets how far that is. The process that computes has ended then, also if this raises
    what interrupts it.
    """
    try:
        connection = socket.create_connection(address, CONNECT_SECONDS)
    except OSError as error:
        return Ended(f"cannot connect to rank 0 at {address}: {error.strerror or error}")
    with connection:
        _prepare(connection)
        try:
            shake_hands(connection, key, Role.JOINER)
        except HandshakeError as error:
            return Ended(f"no rank 0 at {address} for this rank: {error}")
        report(f"joined rank 0 at {address}; waiting until all ranks have")
        # Until rank 0 sends something, which takes any time, this rank needs no memory.
        poll = select.poll()
        poll.register(connection, select.POLLIN | _HANGUP)
        poll.poll()
        if _has_ended(connection):
            return Ended("rank 0 has ended before all ranks had joined")
        return _compute(checkpoint, connection, report)


def _compute(checkpoint: str, connection: socket.socket, report: Report) -> Ended:
    """Run the process of a rank, which ends with the connection and with this process."""
    has_loaded = False
    pair, process = start_child(RANK_MODULE, checkpoint, descriptors=[connection.fileno()])
    poll = select.poll()
    poll.register(pair, select.POLLIN)
    poll.register(connection, _HANGUP)
    try:
        while [descriptor for descriptor, _ in poll.poll()] == [pair.fileno()]:
            if not pair.recv(1):
                break
            has_loaded = True
            report("the model is loaded: this rank computes")
        with suppress(subprocess.TimeoutExpired):  # it has been stopped, or hangs
            process.wait(END_SECONDS)
    finally:
        pair.close()
        process.kill()
        status = process.wait()
    return Ended(f"the rank's process has ended: {ending(status)}", has_loaded)


def join_for_ever(
    checkpoint: str,
    address: Address,
    key: bytes,
    report: Report,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Join rank 0 again and again, until this is interrupted: at once after the model was loaded,
    else with growing pauses. A reason that stays the same is reported once.
    """
    pause_seconds, reported = FIRST_PAUSE_SECONDS, ""
    while True:
        ended = join(checkpoint, address, key, report)
        if ended.has_loaded:
            pause_seconds = FIRST_PAUSE_SECONDS
        if ended.has_loaded or ended.why != reported:
            report(f"{ended.why}; joining again in {pause_seconds:g} s, or later")
            reported = ended.why
        sleep(pause_seconds)
        pause_seconds = min(2 * pause_seconds, MOST_PAUSE_SECONDS)
