"""Socket pairs between processes of one machine, and frames over them."""

import errno
import socket
import struct
import time
from collections.abc import Callable

BUFFER_BYTES = 1 << 20
"""Requested for each direction of a pair. Linux grants at most `net.core.wmem_max`."""

RETRY_SECONDS = 0.005
"""The pause after ENOBUFS: no event says when the kernel has buffers again."""

RECEIVED_BYTES = 1 << 18
"""The most bytes to receive with one system call."""

SWITCH_SECONDS = 0.001
"""How long a thread goes on in Python while another of its process waits to. Python's default is
five times as long.
"""

MAX_FRAME_BYTES = 64 * 1024**2

_LENGTH = struct.Struct("<I")


def socket_pair(
    make: Callable[[], tuple[socket.socket, socket.socket]] = socket.socketpair,
) -> tuple[socket.socket, socket.socket]:
    """Two connected sockets whose buffers hold BUFFER_BYTES, or as much as the kernel allows.

    Raises OSError when no pair can be made.
    """
    pair = make()
    for end in pair:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            _grow(end, option)
    return pair


def send_some(connection: socket.socket, data: bytes | bytearray | memoryview) -> int:
    """Send as many bytes as a non-blocking socket accepts now, and return their number.

    Raises OSError when the other end is gone.
    """
    try:
        return connection.send(data)
    except BlockingIOError:
        return 0
    except OSError as error:
        if error.errno != errno.ENOBUFS:
            raise
        return 0


def send_all(
    connection: socket.socket,
    data: bytes,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Send everything through a blocking socket, in order and without a gap.

    Raises TimeoutError when the other end takes nothing for as long as the socket's timeout, and
    OSError when it is gone.
    """
    rest = memoryview(data)
    waited_seconds = 0.0
    while rest:
        n_bytes = send_some(connection, rest)
        rest = rest[n_bytes:]
        if n_bytes:
            waited_seconds = 0.0
            continue
        timeout_seconds = connection.gettimeout()
        if timeout_seconds is not None and waited_seconds >= timeout_seconds:
            raise TimeoutError(f"the kernel had no buffers for {timeout_seconds:g} s")
        sleep(RETRY_SECONDS)
        waited_seconds += RETRY_SECONDS


def _grow(end: socket.socket, option: int) -> None:
    """Halve the request until the kernel grants it: macOS refuses more than its limit."""
    n_bytes = BUFFER_BYTES
    while end.getsockopt(socket.SOL_SOCKET, option) < n_bytes:
        try:
            end.setsockopt(socket.SOL_SOCKET, option, n_bytes)
        except OSError:
            n_bytes //= 2
        else:
            return


class ProtocolError(Exception):
    """A message does not follow the protocol, or is too long for a frame."""


class FrameBuffer:
    """Splits the bytes that a socket receives into frames."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def add(self, data: bytes) -> list[bytes]:
        """Add received bytes. Returns the bodies of the frames that are complete now. Raises
        ProtocolError.
        """
        self._bytes += data
        bodies, at = [], 0
        while len(self._bytes) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes, at)
            _check_length(length)
            end = at + _LENGTH.size + length
            if len(self._bytes) < end:
                break
            bodies.append(bytes(self._bytes[at + _LENGTH.size : end]))
            at = end
        del self._bytes[:at]
        return bodies


def framed(body: bytes) -> bytes:
    """Make a frame of a body. Raises ProtocolError if it is longer than a receiver takes."""
    _check_length(len(body))
    return _LENGTH.pack(len(body)) + body


def _check_length(n_bytes: int) -> None:
    if n_bytes > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {n_bytes} bytes; {MAX_FRAME_BYTES} are the most")
