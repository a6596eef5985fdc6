"""`rootstock ps`."""

from server.schemas.admin import LiveRequest
from server.schemas.cache import CacheStatsResponse
from server.terminal.client.admin import administered
from server.terminal.client.models import served_models
from server.terminal.commands.on_demand import command_app
from server.terminal.errors import errors_printed
from server.terminal.flags import settings_or_exit
from server.terminal.options import ApiKey, DaemonUrl
from server.terminal.running import endpoint_of
from server.terminal.tables import facts, listing, show
from server.terminal.text import bytes_text

ID_CHARACTERS = 8
CLIENT_CHARACTERS = 14
"""Enough to tell requests and clients apart, and to leave each request a line of 80."""

HEADS = ("request", "status", "client", "prompt", "cached", "answer", "age")

app = command_app()


@app.command()
def ps(url: DaemonUrl = None, api_key: ApiKey = "") -> None:
    """Show what runs: the daemon, its model, its cache, and every live request."""
    with errors_printed():
        endpoint = endpoint_of(url, api_key, settings_or_exit({}))
        models = [model.name for model in served_models(endpoint)]
        with administered(endpoint) as daemon:
            live, cache = daemon.requests(), daemon.cache_stats()
    running = sum(request.status == "running" for request in live)
    show(
        facts(
            [
                ("daemon", endpoint.base_url),
                ("model", ", ".join(models)),
                ("requests", f"{running} running, {len(live) - running} waiting"),
                ("cache", _use(cache)),
            ]
        )
    )
    if live:
        show(listing(HEADS, [_row(request) for request in live]))


def _use(cache: CacheStatsResponse) -> str:
    held, cached = (
        f"{blocks / max(cache.blocks_total, 1):.0%}"
        for blocks in (cache.blocks_held, cache.blocks_cached)
    )
    return f"{held} in use, {cached} kept for later, of {bytes_text(cache.arena_bytes)}"


def _row(request: LiveRequest) -> tuple[str, ...]:
    return (
        request.id[:ID_CHARACTERS],
        f"{request.status}: {request.waits_for}" if request.waits_for else request.status,
        request.client[:CLIENT_CHARACTERS],
        f"{request.prompt_tokens:,}",
        f"{request.cached_tokens:,}",
        f"{request.output_tokens:,}",
        f"{request.age_seconds:,.0f} s",
    )
