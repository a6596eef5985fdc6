"""uvicorn's HTTP, with a limit for what comes beside bodies: it keeps heads and trailers, however
long they are, and before anybody has been asked for a key.
"""

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
"""Of a request line with its headers, of a chunk's framing, or of trailers. What came with the last
of them in one read is not counted.
"""


class BoundedHttp(HttpToolsProtocol):
    """A connection's parser. Who sends more gets a 400, or is cut off in the midst of an answer."""

    _head_bytes = 0  # that have come since a head was complete, or a piece of a body

    def data_received(self, data: bytes) -> None:
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse()
            return
        self._head_bytes += len(data)
        super().data_received(data)

    def on_headers_complete(self) -> None:
        self._head_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def _refuse(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.send_400_response(f"A request's head takes at most {MAX_HEAD_BYTES} bytes.")
        else:
            self.transport.abort()
