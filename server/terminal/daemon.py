"""`rootstock ps`, `load` and `unload`: the models and requests of the running daemon."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from threading import Event
from typing import Annotated

import typer
from rich.console import Console
from rich.status import Status

from server.admin_schema import (
    RESIDENT,
    CacheStatsResponse,
    LiveRequest,
    PooledModelInfo,
    PooledModels,
    State,
)
from server.terminal.admin_client import Admin
from server.terminal.cli import command
from server.terminal.console import (
    TerminalError,
    age_text,
    bytes_text,
    cut,
    facts,
    id_text,
    listing,
    memory_listing,
    show,
    state_text,
)
from server.terminal.endpoint import ApiKey, DaemonUrl, daemon_at, other_daemons

PROGRESS_SECONDS = 0.25  # between two looks at the progress of a load
CLIENT_CHARACTERS = 14
"""Enough to tell clients apart, and to leave each request a line of 80."""

MODEL_HEADS = ("model", "state", "requests", "idle")
HEADS = ("request", "status", "client", "prompt", "cached", "answer", "age")

DaemonModel = Annotated[str, typer.Argument(help="A name of the model, see `rootstock ps`.")]


@command
def load(model: DaemonModel, url: DaemonUrl = None, api_key: ApiKey = "") -> None:
    """Load a model in the running daemon, and wait until it is ready.

    Idle models are unloaded to make room, as for a request.
    """
    with daemon_at(url, api_key, model) as (daemon, _), _progress_shown(daemon, model):
        loaded = daemon.change("load", model)
    memory = f", {bytes_text(loaded.memory.total_bytes)}" if loaded.memory is not None else ""
    typer.echo(f"{loaded.id} is {loaded.state}{memory}")


@contextmanager
def _progress_shown(daemon: Admin, model: str) -> Iterator[None]:
    """Show the progress of a load at a terminal, until the block ends."""
    console, has_ended = Console(stderr=True), Event()
    if not console.is_terminal:
        yield
        return
    with console.status("") as status, ThreadPoolExecutor(1) as threads:
        threads.submit(_follow, daemon, model, has_ended, status)
        try:
            yield
        finally:
            has_ended.set()


def _follow(daemon: Admin, model: str, has_ended: Event, status: Status) -> None:
    while not has_ended.wait(PROGRESS_SECONDS):
        with suppress(TerminalError):
            for each in daemon.models().models:
                if model in {each.id, *each.aliases}:
                    status.update(cut(f"{each.id} {each.state.words}: {each.progress or ''}"))


@command
def unload(model: DaemonModel, url: DaemonUrl = None, api_key: ApiKey = "") -> None:
    """Unload a model in the running daemon, and wait until its memory is free.

    Its running requests finish first. The next request that names the model loads it again.
    """
    with daemon_at(url, api_key, model) as (daemon, _):
        unloaded = daemon.change("unload", model)
    typer.echo(f"{unloaded.id} is {unloaded.state}")


@command
def ps(url: DaemonUrl = None, api_key: ApiKey = "") -> None:
    """Show the running daemon: its models and their memory, the cache of the first model, and every
    live request.
    """
    with daemon_at(url, api_key) as (daemon, endpoint):
        live, pool = daemon.requests(), daemon.models()
        first_is_ready = pool.models[0].state is State.READY
        cache = daemon.cache_stats() if first_is_ready else None
    running = sum(request.status == "running" for request in live)
    show(
        facts(
            [
                ("daemon", endpoint.base_url),
                ("others", "; ".join(other.text for other in other_daemons(endpoint))),
                ("model", _names(pool)),
                ("requests", f"{running} running, {len(live) - running} waiting"),
                ("cache", "" if cache is None else _use(cache)),
                ("memory", _budget(pool)),
            ]
        )
    )
    if len(pool.models) > 1:
        show(listing(MODEL_HEADS, [_model_row(model) for model in pool.models]))
    if loaded := [(each.id, each.memory) for each in pool.models if each.memory is not None]:
        show(memory_listing(loaded))
    if live:
        show(listing(HEADS, [_row(request) for request in live]))


def _names(pool: PooledModels) -> str:
    """All names of the only model, and its state if it is not loaded; several models have a table
    instead.
    """
    if len(pool.models) > 1:
        return ""
    [model] = pool.models
    state = "" if model.state is State.READY else f" ({model.state})"
    return ", ".join((model.id, *model.aliases)) + state


def _budget(pool: PooledModels) -> str:
    if pool.budget_bytes is None:
        return ""
    resident = (model for model in pool.models if model.state in RESIDENT)
    # A model that is being loaded takes what it needs
    taken = sum(
        model.needed_bytes or 0 if model.memory is None else model.memory.total_bytes
        for model in resident
    )
    return f"{bytes_text(taken)} of {bytes_text(pool.budget_bytes)} taken by models"


def _model_row(model: PooledModelInfo) -> tuple[str, ...]:
    return (
        model.id,
        model.state,
        f"{model.requests + model.waiting:,}",
        "" if model.idle_seconds is None else age_text(model.idle_seconds),
    )


def _use(cache: CacheStatsResponse) -> str:
    held, cached = (
        f"{blocks / max(cache.blocks_total, 1):.0%}"
        for blocks in (cache.blocks_held, cache.blocks_cached)
    )
    return f"{held} in use, {cached} kept for later, of {bytes_text(cache.arena_bytes)}"


def _row(request: LiveRequest) -> tuple[str, ...]:
    return (
        id_text(request.id),
        state_text(request.status, request.waits_for),
        request.client[:CLIENT_CHARACTERS],
        f"{request.prompt_tokens:,}",
        f"{request.cached_tokens:,}",
        f"{request.output_tokens:,}",
        age_text(request.age_seconds),
    )
