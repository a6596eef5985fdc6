"""What a thread sends arrives whole, whatever the kernel takes at a time."""

import asyncio
import errno
import socket
from typing import cast

from engine.remote.host import Outbox


class WithoutBuffers:
    """A socket whose kernel has no buffers every other time."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._n_calls = 0

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, data: bytes) -> int:
        self._n_calls += 1
        if self._n_calls % 2:
            raise OSError(errno.ENOBUFS, "No buffer space available")
        return self._connection.send(data[:1000])


async def test_a_kernel_without_buffers_drops_nothing() -> None:
    ours, theirs = socket.socketpair()
    loop = asyncio.get_running_loop()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        outbox = Outbox(cast(socket.socket, WithoutBuffers(ours)), loop)
        data = bytes(range(256)) * 40
        outbox.send(data[:5000])
        outbox.send(data[5000:])
        received = b""
        while len(received) < len(data):
            received += await loop.sock_recv(theirs, 4096)
        assert received == data


def test_what_is_sent_after_the_end_of_the_event_loop_is_dropped() -> None:
    """The process ends then, while the engine's thread may still send events."""
    ours, theirs = socket.socketpair()
    loop = asyncio.new_event_loop()
    loop.close()
    with ours, theirs:
        ours.setblocking(False)
        Outbox(ours, loop).send(bytes(1 << 22))
