"""How much a request may have beside its body."""

import asyncio
import random
import weakref

import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from server.http.connections import MAX_HEAD_BYTES, BoundedHttp
from tests.polling import WAIT_SECONDS
from tests.profiles import examples

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

    def resume_reading(self) -> None: ...

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = True


async def silent(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that never answers."""
    await asyncio.Event().wait()


def connected(application: ASGIApp = silent) -> tuple[BoundedHttp, Socket]:
    # uvicorn's own logging would hold for the whole process: every daemon that a later test starts
    # would write an access log, of which pytest keeps all records to the end of the test.
    config = uvicorn.Config(application, log_config=None)
    protocol, socket = BoundedHttp(config, ServerState(), {}), Socket()
    protocol.connection_made(socket)
    return protocol, socket


async def test_nothing_is_kept_of_a_connection_that_is_reset_between_requests() -> None:
    """uvicorn's timer between requests ends a connection after two minutes, and would keep it."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    protocol, socket = connected(answer)
    protocol.data_received(HEAD + b"\r\n")
    await asyncio.sleep(0)
    assert socket.sent.startswith(b"HTTP/1.1 204 ")
    protocol.connection_lost(ConnectionResetError())
    kept = weakref.ref(protocol)
    del protocol
    await asyncio.sleep(0)
    assert kept() is None


async def test_a_head_that_is_too_long_is_told_the_limit() -> None:
    protocol, socket = connected()
    protocol.data_received(HEAD + b"x" * MAX_HEAD_BYTES)
    assert not socket.closed
    protocol.data_received(b"x")
    assert socket.closed
    assert socket.sent.startswith(b"HTTP/1.1 400 ")
    assert b"at most 65536 bytes" in socket.sent


@pytest.mark.parametrize("seed", range(examples(40)))
async def test_the_limit_is_the_same_however_a_head_arrives(seed: int) -> None:
    """In one write, in any pieces, behind another request, in one header or in many."""
    drawing = random.Random(seed)
    size = MAX_HEAD_BYTES + drawing.choice((-1, 0, 1, 2, 100, 30_000, 300_000))
    head = drawing.choice((b"", HEAD + b"\r\n")) * drawing.randrange(3)
    sent = head + long_head(size, drawing.choice((1, 7, 300)), drawing)
    protocol, socket = connected()
    while sent and not socket.closed and not socket.aborted:
        n_bytes = drawing.choice((len(sent), drawing.randrange(1, 20_000)))
        protocol.data_received(sent[:n_bytes])
        sent = sent[n_bytes:]
    assert (socket.closed or socket.aborted) == (size > MAX_HEAD_BYTES), (seed, size)
    if not head:
        assert (b"at most 65536 bytes" in socket.sent) == (size > MAX_HEAD_BYTES), (seed, size)


def long_head(size: int, n_headers: int, drawing: random.Random) -> bytes:
    """A head of so many bytes, of which a part may be in its target."""
    target = b"/" + b"x" * drawing.choice((0, 0, 5_000, 60_000))
    start = b"GET " + target + b" HTTP/1.1\r\nHost: localhost\r\n"
    rest = size - len(start) - len(b"\r\n")
    per_header = max(rest // n_headers, len(b"X: \r\n"))
    lines = b""
    while rest - len(lines) >= 2 * per_header:
        lines += b"X: " + b"x" * (per_header - len(b"X: \r\n")) + b"\r\n"
    lines += b"X: " + b"x" * (rest - len(lines) - len(b"X: \r\n")) + b"\r\n"
    return start + lines + b"\r\n"


@pytest.mark.parametrize("more", [0, 1])
async def test_trailers_have_the_limit_of_heads(more: int) -> None:
    protocol, socket = connected()
    protocol.data_received(HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n")
    long = MAX_HEAD_BYTES - len(b"X: \r\n\r\n") + more
    protocol.data_received(b"X: " + b"x" * long + b"\r\n\r\n")
    assert socket.aborted == bool(more)


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


async def test_offers_of_another_protocol_are_left_out_of_what_is_asked() -> None:
    """Of each request that came in one read, and of nothing else."""
    asked: list[tuple[str, list[tuple[bytes, bytes]], bytes]] = []
    answered = [asyncio.Event() for _ in range(3)]

    async def listening(scope: Scope, receive: Receive, send: Send) -> None:
        body = (await receive())["body"]
        asked.append((scope["path"], list(scope["headers"]), body))
        answered[len(asked) - 1].set()
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    protocol, socket = connected(listening)
    offer = b"Host: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    first = b"GET /1 HTTP/1.1\r\n" + offer + b"\r\n"
    second = b"POST /2 HTTP/1.1\r\n" + offer + b"Content-Length: 2\r\n\r\n{}"
    protocol.data_received(first + second + b"GET /3 HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await asyncio.wait_for(answered[-1].wait(), WAIT_SECONDS)
    host, connection = (b"host", b"localhost"), (b"connection", b"Upgrade")
    assert asked == [
        ("/1", [host, connection], b""),
        ("/2", [host, connection, (b"content-length", b"2")], b"{}"),
        ("/3", [host], b""),
    ]
    assert not socket.closed
