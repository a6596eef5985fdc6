"""Bytes on their way through a socket, from several threads, none of which waits."""

import asyncio
import socket
import threading


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
            del self._unsent[: self._sent(self._unsent)]
            if not self._unsent:
                self._loop.remove_writer(self._socket)

    def _sent(self, data: bytes | bytearray) -> int:
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)
