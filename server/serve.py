"""The server of the daemon: while models load, while it serves, and while it drains."""

import asyncio
import faulthandler
import gc
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from types import FrameType
from typing import Protocol, cast
from uuid import uuid4

import uvicorn
from anyio import create_task_group, move_on_after, sleep, wait_readable
from anyio.abc import TaskGroup
from fastapi import FastAPI

from engine.values.log_lines import LogFormatter
from server.dialects.error_shapes import error_shape
from server.errors import RETRY_AFTER_SECONDS, busy
from server.http.connections import (
    MAX_HEAD_BYTES,
    AcceptErrors,
    BoundedHttp,
    ConnectionLimits,
    Connections,
    allowed_connections,
)
from server.http.listening import LISTEN_BACKLOG, url
from server.settings import Settings

LAST_BYTES_SECONDS = 3  # for clients to read the last output of a drained engine
LAST_RESORT_SECONDS = 5  # after all that is waited for, the last bytes included
ACCEPTED_AT_ONCE = 16  # so that one turn of the loop does not use up the file descriptors
STDERR = 2  # the descriptor: Python's own stream may be in the midst of a line
FULL_COLLECTIONS_SPARED = 100  # then some seven million objects, their dead taken off, make one due

SWITCH_SECONDS = 0.001
"""How long a worker thread goes on that computes in Python while the event loop waits to. The loop
waits for that anew whenever it has waited for a socket; Python's default is five times as long."""

CLIENT_SECONDS = 5.0  # for a client to send its request, and to read the answer
ACCEPT_RETRY_SECONDS = 1.0  # after an error, such as too many open files
HEAD_END = b"\r\n\r\n"

log = logging.getLogger("rootstock")


def configure_logging(level: str, edited: Callable[[str], str] = str) -> None:
    """Send everything to standard error, each message as `edited` returns it; of uvicorn and HTTP
    clients warnings alone.
    """

    class Formatter(LogFormatter):
        def format(self, record: logging.LogRecord) -> str:
            return edited(super().format(record))

    handler = logging.StreamHandler()
    handler.setFormatter(Formatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    for noisy in ("uvicorn", "httpx", "httpcore"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def freeze_gc() -> None:
    """Exempt all current objects from garbage collection, and make full collections of all others a
    hundred times as rare.

    A full collection stops every thread, and takes long with the objects of loading: modules, model
    and routes, which live to the end. Large bodies would trigger full collections, and no request
    leaves cycles to be collected.
    """
    gc.collect()
    gc.freeze()
    young, middle, full = gc.get_threshold()
    gc.set_threshold(young, middle, full * FULL_COLLECTIONS_SPARED)


@asynccontextmanager
async def answering_not_ready(
    sockets: Sequence[socket.socket], tasks: TaskGroup, reasons: Callable[[], Sequence[str]] = list
) -> AsyncIterator[None]:
    """Answer every request with a 503 until the context ends; the sockets keep listening. Otherwise
    clients would wait until models are loaded, and a router could not try another replica. `tasks`
    finish the requests accepted until then. `reasons` are those that may last without end.
    """
    accepting = [asyncio.create_task(_accept(each, tasks, reasons)) for each in sockets]
    try:
        yield
    finally:
        for task in accepting:
            task.cancel()
        await asyncio.wait(accepting)


async def _accept(
    listener: socket.socket, tasks: TaskGroup, reasons: Callable[[], Sequence[str]]
) -> None:
    """Have each connection answered, until the task is cancelled. Whoever listens next accepts what
    comes then: `loop.sock_accept` would take it for a task that is gone, and lose it.
    """
    listener.setblocking(False)
    while True:
        await wait_readable(listener)
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # its client is gone
            continue
        except OSError:  # such as too many open files
            await sleep(ACCEPT_RETRY_SECONDS)
        else:
            connection.setblocking(False)
            tasks.start_soon(_answer, connection, reasons)


async def _answer(connection: socket.socket, reasons: Callable[[], Sequence[str]]) -> None:
    loop = asyncio.get_running_loop()
    with connection, suppress(OSError), move_on_after(CLIENT_SECONDS):
        head = b""
        while HEAD_END not in head and len(head) < MAX_HEAD_BYTES:
            received = await loop.sock_recv(connection, MAX_HEAD_BYTES)
            if not received:
                return
            head += received
        await loop.sock_sendall(connection, _response(head, reasons()))
        connection.shutdown(socket.SHUT_WR)
        while await loop.sock_recv(connection, MAX_HEAD_BYTES):
            continue  # to close before the client has sent all would reset the connection


def _response(head: bytes, reasons: Sequence[str]) -> bytes:
    """The error as the client of the request's path can read it."""
    words = head.split(maxsplit=2)
    path = words[1].decode("latin-1") if len(words) > 1 else ""
    message = "The server is starting: its models are being loaded."
    message = " ".join([message, *(f"{reason}." for reason in reasons)])
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


class Drained(Protocol):
    """The parts that are drained when the server stops."""

    async def drain(self, timeout_seconds: float) -> None: ...


class DrainingServer(uvicorn.Server):
    """The first signal stops accepting and drains the models: requests finish, or fail when
    `drain_timeout_seconds` have passed.

    The first signal also puts the system's own handlers back: a second one ends the process at
    once, whatever it is doing. uvicorn forces an end on a second SIGINT alone.

    What hangs then keeps no process alive: LAST_RESORT_SECONDS after the time for requests, and for
    the disk cache, it says what all its threads do and ends with status 1.
    """

    def __init__(self, app: FastAPI, models: Drained, settings: Settings) -> None:
        config = uvicorn.Config(
            app,
            http=BoundedHttp,
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=bool(settings.trusted_proxies),  # else anybody could pose as many clients
            forwarded_allow_ips=list(settings.trusted_proxies),
            ws="none",
            backlog=ACCEPTED_AT_ONCE,
            timeout_keep_alive=settings.idle_timeout_seconds,
            timeout_graceful_shutdown=settings.drain_timeout_seconds + LAST_BYTES_SECONDS,
        )
        config.load()
        config.http_protocol_class = cast(
            type[asyncio.Protocol], _connections(settings).guarding(config.http_protocol_class)
        )
        super().__init__(config)
        self._models = models
        self._drain_timeout_seconds = settings.drain_timeout_seconds
        self._last_resort_seconds = _drained_seconds(settings) + LAST_RESORT_SECONDS
        self._has_dashboard = settings.dashboard

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(AcceptErrors())
        await super().startup(sockets)
        for listener in sockets or []:
            listener.listen(LISTEN_BACKLOG)  # uvicorn has set it to ACCEPTED_AT_ONCE
            if self._has_dashboard:
                log.info("the dashboard is on %s", url(listener).removesuffix("v1"))
            log.info("ready on %s", url(listener))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        log.info(
            "finishing running requests, for up to %d s; Ctrl-C again stops at once",
            self._drain_timeout_seconds,
        )
        async with create_task_group() as tasks:
            tasks.start_soon(self._models.drain, self._drain_timeout_seconds)
            await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Writes nothing: the signal may come in the midst of a line of the log, and a stream that
        is entered again raises, so that the signal would be lost.
        """
        self.should_exit = True
        self._end_at_last()
        for handled in (signal.SIGINT, signal.SIGTERM):
            signal.signal(handled, signal.SIG_DFL)

    def _end_at_last(self) -> None:
        """The last resort where a worker thread hangs, for which loop and interpreter would wait.
        faulthandler's thread needs neither, and calls `_exit`. The disk cache survives a kill.
        """
        faulthandler.dump_traceback_later(self._last_resort_seconds, exit=True, file=STDERR)


def _drained_seconds(settings: Settings) -> float:
    """The seconds for running requests to end, and for the disk cache to be written."""
    disk_seconds = settings.disk_cache_shutdown_seconds if settings.disk_cache else 0.0
    return settings.drain_timeout_seconds + disk_seconds


def _connections(settings: Settings) -> Connections:
    limits = ConnectionLimits(
        max_connections=allowed_connections(settings.max_connections),
        header_timeout_seconds=settings.header_timeout_seconds,
        send_timeout_seconds=settings.send_timeout_seconds,
    )
    return Connections(limits)
