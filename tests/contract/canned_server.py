"""A server that is not Rootstock: says what it is told to, once for each request."""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODELS: Mapping[str, object] = {"object": "list", "data": [{"id": "first"}, {"id": "second"}]}


class _Handler(BaseHTTPRequestHandler):
    """GET answers with a page or lists models, POST with the server's body. HTTP/1.0: the end is a
    close, for which a page in `open_pages` waits until the server ends.
    """

    server: "CannedServer"

    def do_GET(self) -> None:
        page = self.server.pages.get(self.path, json.dumps(self.server.models).encode())
        self._send("application/json", page)
        if self.path in self.server.open_pages:
            self.server.is_ending.wait()

    def do_POST(self) -> None:
        if size := int(self.headers["Content-Length"] or 0):
            self.server.requests.append(json.loads(self.rfile.read(size)))
        self._send("text/event-stream", self.server.body)

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _send(self, media_type: str, body: bytes) -> None:
        self.server.keys.append(self.headers["Authorization"])
        self.send_response(self.server.status)
        self.send_header("Content-Type", media_type)
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        self.end_headers()
        with suppress(ConnectionError):  # a client may have read enough
            self.wfile.write(body)


class CannedServer(ThreadingHTTPServer):
    """`requests` has the bodies that were posted, `keys` what each request was authorized with.
    `pages` has what GET answers with, by path.
    """

    def __init__(
        self, body: bytes, status: int, models: object, headers: Mapping[str, str]
    ) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.body = body
        self.status = status
        self.models = models
        self.headers = headers
        self.keys: list[str | None] = []
        self.requests: list[dict[str, Any]] = []
        self.pages: dict[str, bytes] = {}
        self.open_pages: set[str] = set()
        self.is_ending = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


@contextmanager
def canned(
    *events: object, status: int = 200, models: object = MODELS, **headers: str
) -> Iterator[CannedServer]:
    """A server whose answers are these events: strings as they are, everything else as JSON."""
    data = [e if isinstance(e, str) else json.dumps(e, ensure_ascii=False) for e in events]
    body = "".join(f"data: {d}\n\n" for d in data).encode()
    with CannedServer(body, status, models, headers) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.is_ending.set()
            server.shutdown()
            thread.join()
