"""`rootstock cache stats`, `clear` and `probe`."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from server.schemas.cache import CacheStatsResponse
from server.terminal.client.admin import Admin, administered
from server.terminal.commands.on_demand import command_app
from server.terminal.errors import errors_told
from server.terminal.flags import settings_or_exit
from server.terminal.options import ApiKey, DaemonUrl
from server.terminal.running import endpoint_of
from server.terminal.tables import facts, listing, show
from server.terminal.text import bytes_text

app = command_app()


@app.callback()
def cache() -> None:
    """Look into the KV cache of the daemon that runs, or empty it."""


@app.command()
def stats(url: DaemonUrl = None, api_key: ApiKey = "") -> None:
    """Show what the cache holds, and how much it has saved."""
    with _daemon(url, api_key) as daemon:
        counts = daemon.cache_stats()
    show(facts(_facts(counts)))
    if counts.groups:
        heads = ("slots", "total", "free", "cached", "held", "evicted")
        rows = [
            (
                group.name,
                f"{group.total:,}",
                f"{group.free:,}",
                f"{group.cached:,}",
                f"{group.held:,}",
                f"{group.evictions:,}",
            )
            for group in counts.groups
        ]
        show(listing(heads, rows))


@app.command()
def clear(url: DaemonUrl = None, api_key: ApiKey = "") -> None:
    """Forget every prompt that no live request holds."""
    with _daemon(url, api_key) as daemon:
        cleared = daemon.clear_cache()
    typer.echo(f"{cleared.blocks_freed:,} blocks freed, {bytes_text(cleared.bytes_freed)}")


@app.command()
def probe(
    text: Annotated[
        str | None, typer.Argument(help="A user's message. Without it standard input is read.")
    ] = None,
    system: Annotated[str, typer.Option(help="The system prompt before it.")] = "",
    raw: Annotated[bool, typer.Option("--raw", help="A prompt of /v1/completions.")] = False,
    cache_salt: Annotated[str, typer.Option(help="As in the requests.")] = "",
    url: DaemonUrl = None,
    api_key: ApiKey = "",
) -> None:
    """Say how much of a prompt the cache has, and compute nothing."""
    text = sys.stdin.read() if text is None else text
    asked = {"prompt": text} if raw else {"messages": _messages(system, text)}
    with _daemon(url, api_key) as daemon:
        probed = daemon.probe_cache({**asked, "cache_salt": cache_salt})
    typer.echo(f"{probed.cached_tokens:,} of {probed.prompt_tokens:,} tokens are cached")


@contextmanager
def _daemon(url: str | None, api_key: str) -> Iterator[Admin]:
    with errors_told(), administered(endpoint_of(url, api_key, settings_or_exit({}))) as daemon:
        yield daemon


def _messages(system: str, text: str) -> list[dict[str, str]]:
    said = [("system", system)] if system else []
    return [{"role": role, "content": content} for role, content in [*said, ("user", text)]]


def _facts(counts: CacheStatsResponse) -> list[tuple[str, str]]:
    share = counts.hit_tokens / max(counts.queried_tokens, 1)
    return [
        ("arena", f"{bytes_text(counts.arena_bytes)}, {counts.blocks_total:,} blocks"),
        ("block", f"{counts.block_size} tokens"),
        ("free", f"{counts.blocks_free:,} blocks"),
        ("cached", f"{counts.blocks_cached:,} blocks, kept for later"),
        ("held", f"{counts.blocks_held:,} blocks, {counts.blocks_shared:,} by several requests"),
        ("hits", f"{counts.hit_tokens:,} of {counts.queried_tokens:,} tokens, {share:.1%}"),
        ("evictions", f"{counts.evictions:,} blocks"),
        ("copies", f"{counts.cow_copies:,}, of blocks about to be written by one of several"),
    ]
