"""`rootstock cache`: a daemon's cache, and directories of disk caches."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from engine.values.stats import DiskCacheStats, MemoryStats
from kvstore.disk import store as disk_store
from kvstore.disk.store import FolderCheck
from kvstore.disk.types import DiskError
from server.admin_schema import CacheStatsResponse, Remembered
from server.terminal.admin_client import loaded_model, recent_text
from server.terminal.cli import command_group
from server.terminal.console import (
    bytes_text,
    counted,
    errors_printed,
    facts,
    fullness_text,
    listing,
    printable,
    replace_bad_text,
    show,
)
from server.terminal.endpoint import (
    ApiKey,
    DaemonUrl,
    EachModelName,
    LoadedModelName,
    ModelName,
    daemon_at,
)

DIRECTORY = "The folder that --disk-cache names."

NAMELESS = "a model without a name"
"""In a disk cache of an earlier version."""

KINDS = ("kv", "replays", "responses")
TIERS = ("memory", "disk")


def _some_of(names: Sequence[str]) -> Callable[[str | None], str | None]:
    """A check of an option's value: some of these names, with commas between them."""

    def check(value: str | None) -> str | None:
        for given in [] if value is None else value.split(","):
            if given not in names:
                *first, last = names
                raise typer.BadParameter(f"{given}: must be {', '.join(first)} or {last}")
        return value

    return check


Directory = Annotated[Path, typer.Argument(metavar="DIR", help=DIRECTORY)]

cache = command_group()


@cache.callback(no_args_is_help=True)
def about() -> None:
    """Show, clear or check the KV cache of the running daemon, or the folder of a disk cache."""


@cache.command()
def stats(model: LoadedModelName = None, url: DaemonUrl = None, api_key: ApiKey = "") -> None:
    """Show what a model's cache holds, and how much it has saved."""
    with daemon_at(url, api_key, model) as (daemon, _):
        counts = daemon.cache_stats(loaded_model(daemon, model))
    show(facts([*_facts(counts), *_disk_facts(counts.disk)]))
    if counts.groups:
        heads = ("slots", "total", "free", "cached", "held", "evicted", "tokens lost")
        rows = [
            (
                group.name,
                f"{group.total:,}",
                f"{group.free:,}",
                f"{group.cached:,}",
                f"{group.held:,}",
                f"{group.evictions:,}",
                f"{group.unresumable_tokens:,}",
            )
            for group in counts.groups
        ]
        show(listing(heads, rows))


@cache.command()
def clear(
    directory: Annotated[
        Path | None,
        typer.Argument(metavar="[DIR]", help=f"{DIRECTORY} No daemon may use it."),
    ] = None,
    tiers: Annotated[
        str | None,
        typer.Option(callback=_some_of(TIERS), help="memory or disk. Default: both."),
    ] = None,
    what: Annotated[
        str | None,
        typer.Option(
            callback=_some_of(KINDS),
            help="Some of kv, replays (answers with tool calls, remembered as tokens) and "
            "responses (stored ones), with commas between them. Default: kv.",
        ),
    ] = None,
    model: EachModelName = None,
    url: DaemonUrl = None,
    api_key: ApiKey = "",
) -> None:
    """Forget every prompt that no live request holds, in memory and on disk, of each model, loaded
    or not, or of the one that --model names; or empty a disk cache's directory, of all models.
    """
    if directory is not None:
        others = {"--tiers": tiers, "--what": what, "--model": model, "--url": url}
        _clear_directory(directory, others)
        return
    with daemon_at(url, api_key, model) as (daemon, _):
        cleared = daemon.clear_cache(tiers, what, model)
    if not cleared.models and KINDS[0] in (what or KINDS[0]).split(","):
        typer.echo(printable(f"{model or 'every model'}: not loaded, so nothing is in memory"))
    for one in cleared.models:
        freed = f"{one.blocks_freed:,} blocks freed in memory, {bytes_text(one.bytes_freed)}"
        typer.echo(printable(f"{one.id}: {freed if one.failure is None else one.failure}"))
    if cleared.disk_bytes_freed:
        disk = f"{bytes_text(cleared.disk_bytes_freed)} freed on disk"
        typer.echo(f"models that are not loaded: {disk}")
    typer.echo(f"forgotten: {_remembered_text(cleared.forgotten)}")
    kept = cleared.kept
    hint = f" (--what {','.join(KINDS[1:])} forgets them)" if kept.replays + kept.responses else ""
    typer.echo(f"kept: {_remembered_text(kept)}{hint}")


@cache.command()
def du(
    directory: Directory,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Also show each folder's model and format in full.")
    ] = False,
) -> None:
    """Show how much of the disk a disk cache takes, by model. A daemon may use it."""
    with errors_printed(DiskError):
        uses = disk_store.du(directory)
    if uses:
        heads = ("model", "files", "size", "folder")
        rows = [
            (
                use.model or NAMELESS,
                f"{use.n_extents:,}",
                bytes_text(use.allocated_bytes),
                use.folder.name,
            )
            for use in uses
        ]
        show(listing(heads, rows))
        if verbose:
            show(facts([(use.folder.name, use.fingerprint) for use in uses]))
    typer.echo(f"{bytes_text(sum(use.allocated_bytes for use in uses))} in all")


@cache.command()
def verify(directory: Directory) -> None:
    """Read all of a disk cache and compare it with its checksums. No daemon may use it.

    Nothing is changed: a daemon drops damaged files when it reads them, and recomputes their KV.
    """
    is_sound = True
    with errors_printed(DiskError):
        for check in disk_store.verify(directory):
            name = f"{check.model or NAMELESS} ({check.folder.name})"
            typer.echo(printable(f"{name}: {_verdict(check)}"))
            is_sound = is_sound and check.is_sound
    if not is_sound:
        raise typer.Exit(1)


@cache.command()
def probe(
    text: Annotated[
        str | None, typer.Argument(help="A user's message. Default: standard input.")
    ] = None,
    system: Annotated[str, typer.Option(help="The system prompt.")] = "",
    raw: Annotated[
        bool, typer.Option("--raw", help="TEXT is a whole prompt, as in /v1/completions.")
    ] = False,
    cache_salt: Annotated[str, typer.Option(help="The requests' cache_salt.")] = "",
    model: ModelName = None,
    url: DaemonUrl = None,
    api_key: ApiKey = "",
) -> None:
    """Show how much of a prompt is cached. Nothing is computed; a model that is not loaded is
    loaded.
    """
    replace_bad_text()
    text = sys.stdin.read() if text is None else text
    prompt = {"prompt": text} if raw else {"messages": _messages(system, text)}
    with daemon_at(url, api_key, model) as (daemon, _):
        probed = daemon.probe_cache({"model": model or "", "cache_salt": cache_salt, **prompt})
    typer.echo(f"{probed.cached_tokens:,} of {probed.prompt_tokens:,} tokens are cached")


def _clear_directory(directory: Path, others: Mapping[str, str | None]) -> None:
    """Empty the directory. `others` are options that only a daemon takes, with their values."""
    if given := [flag for flag, value in others.items() if value is not None]:
        raise typer.BadParameter("a directory has no daemon", param_hint=", ".join(given))
    with errors_printed(DiskError):
        n_bytes = disk_store.clear(directory)
    typer.echo(f"{bytes_text(n_bytes)} freed")


def _remembered_text(remembered: Remembered) -> str:
    answers = counted(remembered.replays, "answer")
    return f"{answers} with tool calls, {counted(remembered.responses, 'stored response')}"


def _messages(system: str, text: str) -> list[dict[str, str]]:
    turns = [("system", system)] if system else []
    return [{"role": role, "content": content} for role, content in [*turns, ("user", text)]]


def _verdict(check: FolderCheck) -> str:
    """The result of a check, in one line."""
    found = [f"{check.entries:,} entries, {bytes_text(check.n_bytes)}"]
    if check.damaged:
        found.append(f"{len(check.damaged):,} damaged")
    if check.orphans:
        found.append(f"{check.orphans:,} that nothing leads to")
    return ", ".join([*found, "sound"] if check.is_sound else found)


def _facts(counts: CacheStatsResponse) -> list[tuple[str, str]]:
    share = counts.hit_tokens / max(counts.queried_tokens, 1)
    return [
        ("arena", f"{bytes_text(counts.arena_bytes)}, {counts.blocks_total:,} blocks"),
        ("memory", _memory_text(counts.memory)),
        ("block", f"{counts.block_size} tokens"),
        ("free", f"{counts.blocks_free:,} blocks"),
        ("cached", f"{counts.blocks_cached:,} blocks, kept for later"),
        ("held", f"{counts.blocks_held:,} blocks, {counts.blocks_shared:,} by several requests"),
        ("saved", f"{bytes_text(counts.saved_bytes)}, {counts.blocks_saved:,} blocks not copied"),
        ("hits", f"{counts.hit_tokens:,} of {counts.queried_tokens:,} tokens, {share:.1%}"),
        ("lately", recent_text(counts.recent_hits)),
        ("tails", f"{counts.tail_hit_tokens:,} tokens found beyond whole blocks"),
        ("evictions", f"{counts.evictions:,} blocks"),
        (
            "copies",
            f"{counts.prefix_copies:,} blocks of prefixes, {counts.fork_copies:,} of forks",
        ),
    ]


def _memory_text(memory: MemoryStats) -> str:
    return (
        f"{bytes_text(memory.active)} in use by MLX, {bytes_text(memory.peak)} at most, of "
        f"{bytes_text(memory.model.total_bytes)} reserved; "
        f"{bytes_text(memory.model.process_bytes)} resident"
    )


def _disk_facts(disk: DiskCacheStats | None) -> list[tuple[str, str]]:
    if disk is None:
        return []
    failures = ", ".join(f"{count:,} {fault}" for fault, count in disk.failures.items() if count)
    return [
        ("on disk", fullness_text(disk.used_bytes, disk.shared_bytes, disk.limit_bytes)),
        ("loaded", f"{disk.loaded_tokens:,} tokens of {disk.hits:,} prompts"),
        ("read", bytes_text(disk.read_bytes)),
        ("written", bytes_text(disk.written_bytes) + _day_text(disk)),
        ("evicted", f"{disk.evicted_entries:,} blocks; {disk.refused_entries:,} never written"),
        ("failures", failures),
        ("last write", f"failed: {disk.write_fault}" if disk.write_fault else ""),
    ]


def _day_text(disk: DiskCacheStats) -> str:
    return ", as much as it may today" if disk.is_day_spent else ""
