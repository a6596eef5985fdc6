"""Answers requests while the models are loaded that are to be there at start."""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from uuid import uuid4

from anyio import move_on_after, sleep
from anyio.abc import TaskGroup

from server.dialects.errors import error_shape
from server.errors import busy

RETRY_AFTER_SECONDS = 5
CLIENT_SECONDS = 5.0  # for a client to send its request, and to read the answer
ACCEPT_RETRY_SECONDS = 1.0  # after an error, such as too many open files
MAX_HEAD_BYTES = 65_536
HEAD_END = b"\r\n\r\n"


@asynccontextmanager
async def answering_not_ready(
    sockets: Sequence[socket.socket], tasks: TaskGroup
) -> AsyncIterator[None]:
    """Answer every request with a 503 until the context ends; the sockets go on listening. Without
    it clients would wait as long as loading takes, and a router could not try another replica.
    `tasks` finish what has been accepted by then.
    """
    accepting = [asyncio.create_task(_accept(listener, tasks)) for listener in sockets]
    try:
        yield
    finally:
        for task in accepting:
            task.cancel()
        await asyncio.wait(accepting)


async def _accept(listener: socket.socket, tasks: TaskGroup) -> None:
    loop = asyncio.get_running_loop()
    listener.setblocking(False)
    while True:
        try:
            connection, _ = await loop.sock_accept(listener)
        except OSError:
            await sleep(ACCEPT_RETRY_SECONDS)
        else:
            tasks.start_soon(_answer, connection)


async def _answer(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    with connection, suppress(OSError), move_on_after(CLIENT_SECONDS):
        head = b""
        while HEAD_END not in head and len(head) < MAX_HEAD_BYTES:
            received = await loop.sock_recv(connection, MAX_HEAD_BYTES)
            if not received:
                return
            head += received
        await loop.sock_sendall(connection, _response(head))
        connection.shutdown(socket.SHUT_WR)
        while await loop.sock_recv(connection, MAX_HEAD_BYTES):
            continue  # to close before the client has sent all would reset the connection


def _response(head: bytes) -> bytes:
    """The error as the client of the request's path can read it."""
    words = head.split(maxsplit=2)
    path = words[1].decode("latin-1") if len(words) > 1 else ""
    message = "The server is starting: its models are being loaded."
    error = busy(503, message, "server_starting", RETRY_AFTER_SECONDS)
    body = error_shape(path).of(error, uuid4().hex).model_dump_json().encode()
    headers = {
        **error.headers,
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "Connection": "close",
    }
    lines = [f"{name}: {value}\r\n" for name, value in headers.items()]
    return "".join(["HTTP/1.1 503 Service Unavailable\r\n", *lines, "\r\n"]).encode() + body
