"""How much a request may have beside its body."""

import asyncio

import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from server.transport.http import MAX_HEAD_BYTES, BoundedHttp

HEAD = b"GET / HTTP/1.1\r\nHost: localhost\r\n"


class Socket(asyncio.Transport):
    """A transport that remembers what was sent."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self.closed = self.aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent += data

    def pause_reading(self) -> None: ...

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = True


async def silent(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that never answers."""
    await asyncio.Event().wait()


def connected() -> tuple[BoundedHttp, Socket]:
    protocol, socket = BoundedHttp(uvicorn.Config(silent), ServerState(), {}), Socket()
    protocol.connection_made(socket)
    return protocol, socket


async def test_a_head_that_is_too_long_is_told_the_limit() -> None:
    protocol, socket = connected()
    protocol.data_received(HEAD + b"x" * MAX_HEAD_BYTES)
    assert not socket.closed
    protocol.data_received(b"x")
    assert socket.closed
    assert socket.sent.startswith(b"HTTP/1.1 400 ")
    assert b"at most 65536 bytes" in socket.sent


async def test_each_request_has_a_head_of_its_own() -> None:
    protocol, socket = connected()
    for _ in range(20):
        protocol.data_received(HEAD + b"X-Long: " + b"x" * (MAX_HEAD_BYTES // 2))
        protocol.data_received(b"\r\n\r\n")
    assert not socket.closed
    assert not socket.aborted


async def test_in_the_midst_of_a_request_the_connection_ends() -> None:
    """There what was said would be taken for its answer."""
    protocol, socket = connected()
    protocol.data_received(HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n")
    protocol.data_received(b"X-Long: " + b"x" * MAX_HEAD_BYTES)
    protocol.data_received(b"x")
    assert socket.aborted
    assert socket.sent == b""


async def test_a_body_is_no_head_however_it_is_framed() -> None:
    protocol, socket = connected()
    protocol.data_received(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
    for _ in range(3):
        protocol.data_received(b"1\r\nx\r\n" * MAX_HEAD_BYTES)
    assert not socket.closed
    assert not socket.aborted
