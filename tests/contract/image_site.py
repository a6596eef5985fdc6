"""A web site with images, and a resolver of names that leads to it."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Queue
from typing import Any

import pytest

from server.images import fetch
from tests.contract.fake_engine import IMAGE
from tests.polling import WAIT_SECONDS

HOST = "images.example.org"
SERVED = "127.0.0.1"  # which counts as public here


class Site(BaseHTTPRequestHandler):
    """Answers by the first word of the path."""

    hosts: list[str]
    """Of all requests."""
    reached: "Queue[object]"
    """An item for each request that waits until `opened` is set."""
    opened: threading.Event
    server: ThreadingHTTPServer

    def do_GET(self) -> None:
        self.hosts.append(self.headers["Host"])
        port = self.server.server_port
        match self.path.split("/")[1]:
            case "cat":
                self._send(200, IMAGE + b"cat")
            case "elsewhere":
                self._send(302, b"", Location=f"http://other.example.org:{port}/cat")
            case "inside":
                self._send(302, b"", Location=f"http://inside.{HOST}:{port}/cat")
            case "address":
                self._send(302, b"", Location=f"http://127.0.0.1:{port}/cat")
            case "file":
                self._send(302, b"", Location="file:///etc/passwd")
            case "around":
                self._send(302, b"", Location="/around")
            case "thrice":
                left = int(self.path.split("/")[2])
                self._send(302, b"", Location=f"/thrice/{left - 1}" if left > 1 else "/cat")
            case "declared":
                self.send_response(200)
                self.send_header("Content-Length", str(1 << 40))
                self.end_headers()
            case "endless":
                self.send_response(200)
                self.end_headers()
                self._write(b"x" * (1 << 16), 1 << 12, 0.0)
            case "held":
                self.reached.put(self.client_address)
                self.opened.wait(WAIT_SECONDS)
                self._send(200, IMAGE + b"held")
            case "slow":
                self.send_response(200)
                self.end_headers()
                self._write(b"x", 1000, 0.05)
            case _:
                self._send(404, b"nothing")

    def _send(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _write(self, chunk: bytes, times: int, pause_seconds: float) -> None:
        try:
            for _ in range(times):
                self.wfile.write(chunk)
                self.wfile.flush()
                time.sleep(pause_seconds)
        except OSError:
            pass  # it was cut off

    def log_message(self, format: str, *args: object) -> None:
        pass


class Names:
    """A resolver: the addresses of each name, one list for each time that it is looked up."""

    def __init__(self) -> None:
        self.addresses = {HOST: [[SERVED]], f"inside.{HOST}": [["127.0.0.2"]]}
        self.looked_up: list[str] = []

    def decide(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have the daemons of this process look names up here, and take SERVED for public."""
        monkeypatch.setattr(fetch, "getaddrinfo", self)
        monkeypatch.setattr(fetch, "is_public", lambda address: str(address) == SERVED)

    async def __call__(self, host: str, port: int, **options: Any) -> list[Any]:
        self.looked_up.append(host)
        answers = self.addresses.get(host)
        if not answers:
            raise socket.gaierror
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        kind = socket.SOCK_STREAM
        return [(socket.AF_INET, kind, 6, "", (address, port)) for address in found]


@contextmanager
def running_site() -> Iterator[str]:
    """The URL of the site, without a path."""
    Site.hosts, Site.reached, Site.opened = [], Queue(), threading.Event()
    server = ThreadingHTTPServer((SERVED, 0), Site)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://{HOST}:{server.server_address[1]}"
    finally:
        Site.opened.set()
        server.shutdown()
        thread.join()
        server.server_close()
