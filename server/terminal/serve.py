"""`rootstock serve`: loads models, and serves them until a signal ends it."""

import asyncio
import errno
import logging
import socket
import sys
from contextlib import ExitStack, suppress

import httpx
import typer
from anyio import create_task_group
from uvicorn.loops.auto import auto_loop_factory

from engine.api import ModelError
from engine.launch import launch
from server.app import create_app
from server.http.listening import base_url, listening
from server.models.model import aliases_of
from server.models.pool import LoadFailed, PoolError
from server.models.registry import ModelRegistry, StartEngine
from server.serve import (
    SWITCH_SECONDS,
    DrainingServer,
    answering_not_ready,
    configure_logging,
    freeze_gc,
)
from server.settings import Settings
from server.terminal.agents import AGENTS
from server.terminal.cli import command
from server.terminal.endpoint import reachable
from server.terminal.flags import with_settings
from server.terminal.records import recorded, records_folder, running_records

TRIED_PORTS = 100
MAX_PORT = 65_535

log = logging.getLogger("rootstock")


@command
@with_settings()
def serve(settings: Settings) -> None:
    """Load models, then serve them until SIGINT or SIGTERM."""
    configure_logging(settings.log_level)
    with ExitStack() as held:
        try:
            sockets = held.enter_context(listening(settings.host, settings.port))
        except OSError as error:
            log.error("%s", _cannot_listen(settings, error))
            raise typer.Exit(1) from None
        served_at = base_url(reachable(settings.host), sockets[0].getsockname()[1])
        names = [alias.name for model in settings.each_model() for alias in aliases_of(model)]
        try:
            held.enter_context(recorded(served_at, names))
        except OSError as error:
            log.warning(
                "commands find this daemon by --url alone: cannot write to %s: %s",
                records_folder(),
                error.strerror,
            )
        runner = held.enter_context(asyncio.Runner(loop_factory=auto_loop_factory()))
        if not runner.run(serve_models(settings, sockets)):
            raise typer.Exit(1)


def _cannot_listen(settings: Settings, error: OSError) -> str:
    """Why the daemon cannot listen, and what to do."""
    host, port = settings.host, settings.port
    match error.errno:
        case errno.EADDRINUSE:
            advice = f"start this one with --port {_free_port(host, port)}"
            for record in running_records():
                if httpx.URL(record.url).port == port:
                    return (
                        f"port {port} is taken by a Rootstock (pid {record.pid}) at {record.text}: "
                        f"use that one, or {advice}"
                    )
            return f"port {port} of {host} is taken by another program: {advice}"
        case errno.EACCES:
            return f"port {port} is for the system: choose one from 1024 on, such as --port 8000"
        case errno.EADDRNOTAVAIL:
            return f"host: {host} is no address of this machine"
        case _:
            return f"cannot listen on {host}, port {port}: {error.strerror}"


def _free_port(host: str, taken: int) -> int:
    """The next port on which this host can listen; 0, any free one, if none of the next is free."""
    for port in range(taken + 1, min(taken + TRIED_PORTS, MAX_PORT) + 1):
        with suppress(OSError), listening(host, port):
            return port
    return 0


async def serve_models(
    settings: Settings, sockets: list[socket.socket], start: StartEngine = launch
) -> bool:
    """Serve until the server has stopped. Returns False where it has not begun to serve; a line of
    the log says why.
    """
    async with create_task_group() as tasks:
        try:
            async with answering_not_ready(sockets, tasks):
                models = ModelRegistry(settings, start)
                await tasks.start(models.run)
                await models.preload()
        except (ModelError, PoolError) as error:
            if not isinstance(error, LoadFailed):  # which the pool has logged
                log.error("%s", error)
            tasks.cancel_scope.cancel()
            return False
        server = DrainingServer(create_app(models, settings, tuple(AGENTS)), models, settings)
        freeze_gc()
        sys.setswitchinterval(SWITCH_SECONDS)
        await server.serve(sockets=sockets)
        tasks.cancel_scope.cancel()
    return True
