"""`rootstock serve`: loads models, and serves them until a signal ends it."""

import asyncio
import logging
import socket
import sys
from contextlib import ExitStack

import typer
from anyio import create_task_group
from uvicorn.loops.auto import auto_loop_factory

from engine.api import ModelError
from engine.launch import launch
from server.admin.pages import Launch, LaunchableAgent
from server.app import create_app
from server.http.listening import listening
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
from server.terminal.flags import with_settings

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
            log.error(
                "cannot listen on %s, port %d: %s", settings.host, settings.port, error.strerror
            )
            raise typer.Exit(1) from None
        runner = held.enter_context(asyncio.Runner(loop_factory=auto_loop_factory()))
        if not runner.run(serve_models(settings, sockets)):
            raise typer.Exit(1)


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
        server = DrainingServer(create_app(models, settings, page_launch()), models, settings)
        freeze_gc()
        sys.setswitchinterval(SWITCH_SECONDS)
        await server.serve(sockets=sockets)
        tasks.cancel_scope.cancel()
    return True


def page_launch() -> Launch:
    """What the page's `rootstock launch` lines are made of."""
    agents = [
        LaunchableAgent(
            name=name, context_tokens=agent.least_context_tokens, calls_tools=agent.calls_tools
        )
        for name, agent in AGENTS.items()
    ]
    return Launch(command="rootstock", agents=agents)
