"""Socket pairs on kernels that answer as macOS does."""

import errno
import socket
from collections.abc import Sequence
from typing import cast

import pytest

from engine.process.sockets import BUFFER_BYTES, RETRY_SECONDS, send_all, send_some, socket_pair

MACOS_BYTES = 8192
"""`net.local.stream.sendspace` of macOS."""


class MacSocket:
    """Small buffers by default, and none beyond a limit."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._sizes = {socket.SO_SNDBUF: MACOS_BYTES, socket.SO_RCVBUF: MACOS_BYTES}

    def getsockopt(self, level: int, option: int) -> int:
        assert level == socket.SOL_SOCKET
        return self._sizes[option]

    def setsockopt(self, level: int, option: int, n_bytes: int) -> None:
        assert level == socket.SOL_SOCKET
        if n_bytes > self._limit_bytes:
            raise OSError(errno.ENOBUFS, "No buffer space available")
        self._sizes[option] = n_bytes


class Sender:
    """A socket that sends, or raises, what its script says; then all of it."""

    def __init__(self, script: Sequence[int | OSError], timeout: float | None = None) -> None:
        self._script = list(script)
        self._timeout = timeout
        self.sent = b""

    def send(self, data: memoryview) -> int:
        step = self._script.pop(0) if self._script else len(data)
        if isinstance(step, OSError):
            raise step
        self.sent += data[:step]
        return step

    def gettimeout(self) -> float | None:
        return self._timeout


NO_BUFFERS = OSError(errno.ENOBUFS, "No buffer space available")


@pytest.mark.parametrize(
    ("limit_bytes", "granted"),
    [(8 * BUFFER_BYTES, BUFFER_BYTES), (300_000, BUFFER_BYTES // 4), (MACOS_BYTES, MACOS_BYTES)],
)
def test_both_ends_get_the_largest_buffers_that_the_kernel_grants(
    limit_bytes: int, granted: int
) -> None:
    made = MacSocket(limit_bytes), MacSocket(limit_bytes)
    pair = socket_pair(lambda: cast(tuple[socket.socket, socket.socket], made))
    for end in pair:
        assert end.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == granted
        assert end.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) == granted


def test_a_pair_of_this_machine_holds_more_than_by_default_unless_that_is_enough() -> None:
    plain, grown = socket.socketpair(), socket_pair()
    try:
        for ours, others in zip(grown, plain, strict=True):
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                granted = ours.getsockopt(socket.SOL_SOCKET, option)
                default = others.getsockopt(socket.SOL_SOCKET, option)
                assert granted > default or default >= BUFFER_BYTES
    finally:
        for end in (*plain, *grown):
            end.close()


def test_a_kernel_without_buffers_takes_nothing_and_loses_nothing() -> None:
    sender = Sender([NO_BUFFERS, BlockingIOError(), 2])
    data, taken = b"frame", []
    while data:
        taken.append(send_some(cast(socket.socket, sender), data))
        data = data[taken[-1] :]
    assert taken == [0, 0, 2, 3]
    assert sender.sent == b"frame"


def test_a_peer_that_is_gone_is_an_error() -> None:
    with pytest.raises(BrokenPipeError):
        send_some(cast(socket.socket, Sender([BrokenPipeError()])), b"frame")


def test_all_is_sent_in_order_around_pauses() -> None:
    pauses: list[float] = []
    sender = Sender([3, NO_BUFFERS, NO_BUFFERS, 1, NO_BUFFERS])
    send_all(cast(socket.socket, sender), b"a whole frame", pauses.append)
    assert sender.sent == b"a whole frame"
    assert pauses == [RETRY_SECONDS] * 3


def test_a_kernel_that_never_has_buffers_times_out() -> None:
    pauses: list[float] = []
    sender = Sender([NO_BUFFERS] * 100, timeout=0.1)
    with pytest.raises(TimeoutError, match=r"no buffers for 0\.1 s"):
        send_all(cast(socket.socket, sender), b"frame", pauses.append)
    assert sum(pauses) == pytest.approx(0.1)
