"""uvicorn's HTTP protocol with a limit on heads and trailers, which it would buffer without one,
before the API key is checked. Offers of other protocols (`Upgrade`) are ignored.
"""

from array import array
from typing import Any

from httptools import HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
"""Of a request line with its headers, of a chunk's framing, or of trailers. What came with the last
of them in one read is not counted.
"""


class BoundedHttp(HttpToolsProtocol):
    """A connection's parser. A head that is too large gets a 400; in the midst of an answer the
    connection is aborted.
    """

    _head_bytes = 0  # that have come since a head was complete, or a piece of a body

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.parser = PlainParser(self)

    def data_received(self, data: bytes) -> None:
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse()
            return
        self._head_bytes += len(data)
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Also ends the cycles of the protocol with its parser and its last request, which would
        keep both until a full garbage collection.
        """
        super().connection_lost(exc)
        self.cycle = None  # type: ignore[assignment]
        del self.parser

    def on_headers_complete(self) -> None:
        self._head_bytes = 0
        if not self._offers_protocol:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._offers_protocol:
            super().on_message_complete()

    def plain_head(self) -> bytes:
        """Of the request whose head came last, without its offer of another protocol."""
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
            else:
                return
