"""Limits that an ASGI server lacks: on silent clients, on clients that do not read, on connections
and on the file descriptors that they need.

A `Connection` stands between the socket and the HTTP parser, `BoundedHttp`. The gateway tells it
when a request begins, when its body is complete, and when it ends.
"""

import asyncio
import errno
import logging
import resource
import subprocess
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from httptools import HttpParserCallbackError, HttpParserUpgrade, HttpRequestParser
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

RESERVED_DESCRIPTORS = 128  # the model's files, the log, and connections that are just closing
OUT_OF_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
REPORT_SECONDS = 60.0
MACOS_OPEN_MAX = 10_240  # what every macOS allows a process
SYSCTL_SECONDS = 5.0

log = logging.getLogger("rootstock.connections")

ProtocolFactory = Callable[..., asyncio.Protocol]
"""Makes the protocol that parses HTTP, from uvicorn's keyword arguments."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    max_connections: int
    header_timeout_seconds: float  # for a request's head, from its first byte or from connecting
    send_timeout_seconds: float  # without a single byte that the client takes

    @property
    def max_answering(self) -> int:
        """Below `max_connections`, so that `/health` is always answered."""
        return self.max_connections - self._n_reserved

    @property
    def max_answering_small(self) -> int:
        """The limit, above `max_answering`, for clients with less than their share of connections:
        half of the reserve is theirs.
        """
        return self.max_connections - self._n_reserved + self._n_reserved // 2

    @property
    def _n_reserved(self) -> int:
        return max(1, self.max_connections // 16)


class Connections:
    """All open connections. Beyond `max_connections`, a connection that waits for its client's
    request is closed: of the address that has most of them, the one that has waited longest. A
    connection whose client waits for the server is never closed for another.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._waiting: dict[Connection, None] = {}  # for their client, the longest first
        self._n_waiting = Counter[str]()  # by address
        self._answering: dict[Connection, str] = {}  # with their clients
        self._n_answering = Counter[str]()  # by client

    def guarding(self, make_inner: ProtocolFactory) -> ProtocolFactory:
        """The protocol, wrapped in a Connection."""

        def make(*, app_state: dict[str, Any], **arguments: Any) -> Connection:
            return Connection(
                self, lambda state: make_inner(app_state=app_state | state, **arguments)
            )

        return make

    def is_full_for(self, client: str) -> bool:
        """Whether another request of the client has to be refused."""
        limits, n_answering = self.limits, len(self._answering)
        if n_answering < limits.max_answering:
            return False
        n_clients = len(self._n_answering.keys() | {client})
        has_its_share = self._n_answering[client] >= limits.max_answering // n_clients
        return has_its_share or n_answering >= limits.max_answering_small

    def add(self, connection: "Connection") -> None:
        self.waits_for_client(connection)
        if len(self._waiting) + len(self._answering) > self.limits.max_connections:
            most = max(self._n_waiting.values())
            longest = next(one for one in self._waiting if self._n_waiting[one.address] == most)
            self.remove(longest)
            longest.close()

    def waits_for_client(self, connection: "Connection") -> None:
        self.remove(connection)
        self._waiting[connection] = None
        self._n_waiting[connection.address] += 1

    def waits_for_server(self, connection: "Connection", client: str) -> None:
        self.remove(connection)
        self._answering[connection] = client
        self._n_answering[client] += 1

    def remove(self, connection: "Connection") -> None:
        if connection in self._waiting:
            del self._waiting[connection]
            _take_one(self._n_waiting, connection.address)
        elif connection in self._answering:
            _take_one(self._n_answering, self._answering.pop(connection))


def _take_one(counts: Counter[str], name: str) -> None:
    counts[name] -= 1
    if not counts[name]:
        del counts[name]


class Connection(asyncio.Protocol):
    """One client's connection, passed on to `inner`, with two timers: for the head of the next
    request, and for bytes that the client does not read.
    """

    def __init__(
        self,
        connections: Connections,
        make_inner: Callable[[dict[str, "Connection"]], asyncio.Protocol],
    ) -> None:
        self._connections = connections
        self._limits = connections.limits
        self._inner = make_inner({"connection": self})
        self.address = ""  # of the client, without its port
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._closed = False
        self._requests = 0  # more than one when a client sends ahead
        self._head_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        self._flushed = asyncio.Event()
        self._flushed.set()
        self._flushes = 0

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if peer := transport.get_extra_info("peername"):
            self.address = peer[0]
        # With no room to spare "paused" means that something is unsent, and nothing is added to
        # it: if it does not shrink the client does not read.
        self._transport.set_write_buffer_limits(high=0)
        self._inner.connection_made(transport)
        self._start_head_timer()
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        self._flushed.set()
        inner, self._inner = self._inner, asyncio.Protocol()  # which refer to each other
        inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._requests == 0 and self._head_timer is None:
            self._start_head_timer()
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._flushed.clear()
        if self._send_timer is None:
            self._start_send_timer()
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._flushed.set()
        self._flushes += 1
        self._inner.resume_writing()

    # Called by the gateway.

    def is_full_for(self, client: str) -> bool:
        """Whether as many requests are in progress as are allowed, for one more of the client."""
        return self._connections.is_full_for(client)

    def request_began(self) -> None:
        self._requests += 1
        self._stop_head_timer()
        if not self._closed and self._requests == 1:
            self._connections.waits_for_client(self)

    def request_complete(self, client: str) -> None:
        """Head and body have come: from here on the client waits for the server."""
        if not self._closed:
            self._connections.waits_for_server(self, client)

    def request_ended(self) -> None:
        self._requests -= 1
        if not self._closed and self._requests == 0:
            self._connections.waits_for_client(self)

    async def flushed(self) -> None:
        """Return when the client has read all that was sent, or has left."""
        await self._flushed.wait()

    def close(self) -> None:
        self._leave()
        self._transport.close()

    def abort(self) -> None:
        """Close at once; what has not been sent is lost."""
        self._leave()
        self._transport.abort()

    def _leave(self) -> None:
        self._closed = True
        self._stop_head_timer()
        if self._send_timer is not None:
            self._send_timer.cancel()
        self._connections.remove(self)

    def _start_head_timer(self) -> None:
        seconds = self._limits.header_timeout_seconds
        self._head_timer = self._loop.call_later(seconds, self._head_too_late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_too_late(self) -> None:
        log.debug("closed a connection that sent no request")
        self.close()

    def _start_send_timer(self) -> None:
        """Start the timer for unread bytes. It is renewed while the client reads, so no timer is
        set for each write.
        """
        unsent = self._transport.get_write_buffer_size()
        seconds = self._limits.send_timeout_seconds
        self._send_timer = self._loop.call_later(seconds, self._check_sent, self._flushes, unsent)

    def _check_sent(self, flushes: int, unsent: int) -> None:
        self._send_timer = None
        if self._flushed.is_set():
            return
        if self._flushes > flushes or self._transport.get_write_buffer_size() < unsent:
            self._start_send_timer()
            return
        log.warning("closed a connection whose client read nothing")
        self.abort()


def connection_of(scope: Scope) -> Connection | None:
    """The connection of a request; None for one that comes without a socket."""
    return cast(Connection | None, scope.get("state", {}).get("connection"))


def allowed_connections(wanted: int) -> int:
    """The number of connections that the limit of open files allows, after raising the limit.

    At most `wanted`. The soft limit is 256 on macOS, and 1,024 on most Linux systems.
    """
    limit = _raised(wanted + RESERVED_DESCRIPTORS)
    allowed = min(wanted, max(limit - RESERVED_DESCRIPTORS, limit // 2))
    if allowed < wanted:
        log.warning("%d connections at most: the limit of open files is %d", allowed, limit)
    return allowed


def _raised(needed: int) -> int:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft != unlimited and soft < needed:
        allowed = needed if hard == unlimited else min(needed, hard)
        for limit in _possible_limits(allowed):
            if limit <= soft:
                continue
            with suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
                break
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return needed if soft == unlimited else soft


def _possible_limits(allowed: int) -> Iterator[int]:
    """The soft limits to try. macOS refuses more than kern.maxfilesperproc, which depends on the
    machine's memory, although its hard limit is infinite.
    """
    yield allowed
    with suppress(OSError, ValueError, subprocess.SubprocessError):
        question = ["sysctl", "-n", "kern.maxfilesperproc"]
        answer = subprocess.run(question, capture_output=True, timeout=SYSCTL_SECONDS, check=True)
        yield min(allowed, int(answer.stdout))
    yield min(allowed, MACOS_OPEN_MAX)


class AcceptErrors:
    """The event loop's exception handler. It says once a minute, in one line, that no connection
    can be accepted; asyncio would write a traceback for each attempt.
    """

    def __init__(self) -> None:
        self._next_report_seconds = 0.0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in OUT_OF_RESOURCES:
            loop.default_exception_handler(context)
        elif loop.time() >= self._next_report_seconds:
            self._next_report_seconds = loop.time() + REPORT_SECONDS
            log.error("cannot accept connections: %s", error.strerror)


MAX_HEAD_BYTES = 64 * 1024
"""Bytes of a request line with its headers, or of trailers: without the white space around values
that nothing asks for. Those of a chunk's framing count with what came in the same read.
"""

LINE_BYTES = len(" ") + len(" HTTP/1.1\r\n")  # of a request line, beside method and target
FIELD_BYTES = len(": ") + len("\r\n")  # of a header, beside name and value
END_BYTES = len("\r\n")


class HeadTooLarge(Exception):
    """A head or trailers of more than MAX_HEAD_BYTES."""


class BoundedHttp(HttpToolsProtocol):
    """uvicorn's protocol with a limit on heads and trailers, which it would buffer without one,
    before the API key is checked. Offers of other protocols (`Upgrade`) are ignored.

    A head that is too large gets a 400; in the midst of an answer the connection is aborted.
    """

    _unread_bytes = 0  # that have come since a head was complete, or a piece of a body
    _head_bytes = 0  # of the head, or the trailers, as far as they are read
    _running: RequestResponseCycle | None = None  # `cycle` is the latest, sent ahead perhaps

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.parser = PlainParser(self)

    def data_received(self, data: bytes) -> None:
        if self._unread_bytes > MAX_HEAD_BYTES:
            self._refuse()
            return
        self._unread_bytes += len(data)
        try:
            super().data_received(data)
        except HeadTooLarge:
            self._refuse()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the running request, where the client has sent others ahead; uvicorn tells the
        latest one alone. Also ends the cycles of the protocol with its parser and its last request,
        which would keep both until a full garbage collection, and the timer between requests, which
        would keep all that of a connection that the client has reset.
        """
        self._unset_keepalive_if_required()
        if self._running is not None:
            self._running.disconnected = not self._running.response_complete
            self._running.message_event.set()
            self._running = None
        super().connection_lost(exc)
        self.cycle = None  # type: ignore[assignment]
        del self.parser

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_message_begin(self) -> None:
        self._head_bytes = END_BYTES
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        beside = 0 if self.url else len(self.parser.get_method()) + LINE_BYTES
        self._count(beside + len(url))  # which may come in pieces
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + FIELD_BYTES)
        super().on_header(name, value)

    def _count(self, n_bytes: int) -> None:
        self._head_bytes += n_bytes
        if self._head_bytes > MAX_HEAD_BYTES:
            raise HeadTooLarge

    def on_headers_complete(self) -> None:
        self._unread_bytes = 0
        self._head_bytes = END_BYTES
        if not self._offers_protocol:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unread_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._offers_protocol:
            super().on_message_complete()

    def plain_head(self) -> bytes:
        """The latest request head, without its upgrade to another protocol."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        lines = [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([b"%b %b HTTP/%b" % (method, self.url, version), *lines, b"", b""])

    @property
    def _offers_protocol(self) -> bool:
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _refuse(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.send_400_response(f"A request's head takes at most {MAX_HEAD_BYTES} bytes.")
        else:
            self.transport.abort()


class PlainParser(HttpRequestParser):
    """Reads a request that offers another protocol as one that does not (RFC 9110, section 7.8):
    Java's client offers h2c with its first. httptools takes its body for the other protocol's.
    """

    def __init__(self, protocol: BoundedHttp) -> None:
        super().__init__(protocol)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
        self._protocol = protocol

    def feed_data(self, data: "bytes | bytearray | memoryview | array[int]") -> None:
        unread = memoryview(data)
        while unread:
            try:
                super().feed_data(unread)
            except HttpParserUpgrade as offer:
                super().feed_data(self._protocol.plain_head())
                unread = unread[offer.args[0] :]
            except HttpParserCallbackError as error:
                if isinstance(error.__context__, HeadTooLarge):
                    raise HeadTooLarge from error
                raise
            else:
                return
