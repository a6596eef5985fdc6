"""Requests by bare sockets: of clients that leave, that read nothing, or that say half of it."""

import json
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.polling import WAIT_SECONDS

CHAT_PATH = "/v1/chat/completions"
LITTLE = {socket.SO_SNDBUF: 4096}
"""Options of a daemon's sockets with a send buffer that is soon full when the client does not
read."""


@contextmanager
def connected(base_url: str, *, is_deaf: bool = False) -> Iterator[socket.socket]:
    """A connection, closed when the block ends. A deaf client's has little room for answers."""
    address = urlsplit(base_url)
    with socket.socket() as connection:
        if is_deaf:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(WAIT_SECONDS)
        connection.connect((address.hostname, address.port))
        yield connection


def request_head(content: bytes, length: int | None = None, path: str = CHAT_PATH) -> bytes:
    """A request with `content` as its body, or as the beginning of a longer one."""
    n_bytes = len(content) if length is None else length
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {n_bytes}\r\n\r\n".encode() + content


@contextmanager
def posted(
    base_url: str, path: str, body: object, *, is_deaf: bool = False
) -> Iterator[socket.socket]:
    """A connection with the request sent."""
    with connected(base_url, is_deaf=is_deaf) as connection:
        connection.sendall(request_head(json.dumps(body).encode(), path=path))
        yield connection


def is_healthy(base_url: str) -> bool:
    return httpx.get(f"{base_url}/health", timeout=WAIT_SECONDS).status_code == 200


def writes(connection: socket.socket) -> list[list[Any]]:
    """The answer: each chunk of the transfer, which is what was written at once, as its events."""
    with connection.makefile("rb") as received:
        assert received.readline().startswith(b"HTTP/1.1 200")
        while received.readline() != b"\r\n":
            pass
        chunks = []
        while size := int(received.readline(), 16):
            chunks.append(received.read(size).decode())
            received.readline()
    found = (re.findall(r"^(?:data: )?(\{.*)$", chunk, re.MULTILINE) for chunk in chunks)
    return [[json.loads(event) for event in events] for events in found if events]
