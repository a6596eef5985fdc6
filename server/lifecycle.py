"""The server's start and shutdown: the first signal drains, the second ends the process."""

import asyncio
import faulthandler
import gc
import logging
import signal
import socket
from types import FrameType
from typing import Protocol, cast

import uvicorn
from anyio import create_task_group
from fastapi import FastAPI

from server.http.connections import ConnectionLimits, Connections
from server.http.descriptors import AcceptErrors, allowed_connections
from server.http.listening import LISTEN_BACKLOG, url
from server.http.protocol import BoundedHttp
from server.settings import Settings

LAST_BYTES_SECONDS = 3  # for clients to read what a drained engine still had to say
LAST_RESORT_SECONDS = 5  # behind all that is waited for, the last bytes included
ACCEPTED_AT_ONCE = 16  # so that one turn of the loop does not use up the file descriptors
STDERR = 2  # the descriptor: Python's own stream may be in the midst of a line
FULL_COLLECTIONS_SPARED = 100  # then some seven million objects, their dead taken off, make one due

log = logging.getLogger("rootstock")


SWITCH_SECONDS = 0.001
"""How long a worker thread goes on that computes in Python while the event loop waits to. The loop
waits for that anew whenever it has waited for a socket; Python's default is five times as long."""


def spare_full_collections() -> None:
    """Exempt all current objects from garbage collection, and make full collections of all others a
    hundred times as rare.

    A full collection stops every thread, and takes long with the objects of loading: modules, model
    and routes, which live to the end. Large bodies would trigger full collections, and have no
    cycles to be collected.
    """
    gc.collect()
    gc.freeze()
    young, middle, full = gc.get_threshold()
    gc.set_threshold(young, middle, full * FULL_COLLECTIONS_SPARED)


class Drained(Protocol):
    """What is drained when the server stops."""

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
            "draining for up to %d s; a second signal stops at once, and after %g s whatever hangs",
            self._drain_timeout_seconds,
            self._last_resort_seconds,
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
