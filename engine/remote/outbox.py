"""Bytes on their way through a socket, from several threads, none of which waits."""

import asyncio
import socket
import threading

from engine.sockets import RETRY_SECONDS, send_some


class Outbox:
    """Sends at once what the socket takes; the rest, when it takes more, from the event loop."""

    def __init__(self, connection: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        self._socket = connection
        self._loop = loop
        self._unsent = bytearray()
        self._lock = threading.Lock()

    def send(self, data: bytes) -> None:
        """On any thread. What is sent behind it is received behind it. Never raises: who reads
        finds out that the other end is gone.
        """
        with self._lock:
            if not self._unsent:
                data = data[self._sent(data) :]
                if data:
                    self._loop.call_soon_threadsafe(self._wait)
            self._unsent += data

    def _wait(self) -> None:
        self._loop.add_writer(self._socket, self._send_rest)

    def _send_rest(self) -> None:
        with self._lock:
            n_bytes = self._sent(self._unsent)
            del self._unsent[:n_bytes]
            if not self._unsent:
                self._loop.remove_writer(self._socket)
            elif not n_bytes:  # writable, but the kernel has no buffers: try again, but do not spin
                self._loop.remove_writer(self._socket)
                self._loop.call_later(RETRY_SECONDS, self._wait)

    def _sent(self, data: bytes | bytearray) -> int:
        try:
            return send_some(self._socket, data)
        except OSError:
            return len(data)
