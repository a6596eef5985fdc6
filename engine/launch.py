"""Starts engines, and helper processes that compute a model's memory or fetch a repository.

The server imports no MLX: what needs MLX runs in another process.
"""

import asyncio
import os
import signal
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from engine.api import Engine, ModelError, Progress, Report
from engine.mlx_backend.backend import describe_machine
from engine.mlx_backend.helper import ANSWER, CONFIG
from engine.mlx_backend.loading.checkpoint import Checkpoint
from engine.mlx_backend.loading.locate import (
    about_draft_model,
    find_checkpoint,
    local_checkpoint,
    open_checkpoint,
)
from engine.process.child import start_child
from engine.process.folders import cache_folder
from engine.process.handshake import read_key
from engine.process.joining import Address, join_for_ever
from engine.process.pressure import open_sources
from engine.remote.engine import RemoteEngine, tokenizer_of
from engine.values.settings import DiskCacheConfig, EngineConfig
from engine.values.stats import ModelMemory
from kvstore.disk.folder import joined, new_daemon, wrap_errors
from kvstore.disk.store import clear_unopened
from kvstore.disk.types import DiskError

__all__ = [
    "Checkpoint",
    "about_draft_model",
    "cache_folder",
    "check_directory",
    "clear_unloaded",
    "describe_machine",
    "fetch_repository",
    "find_checkpoint",
    "free_bytes",
    "join_ranks",
    "launch",
    "local_checkpoint",
    "needed_memory",
    "open_checkpoint",
    "open_sources",
    "tokenizer_of",
]


_HELPER = "engine.mlx_backend.helper"


async def launch(config: EngineConfig, report: Report) -> Engine:
    """Load the model in a process of its own. Returns when it is ready.

    Raises whatever loading raises, with a message for the user. Cancelled, it ends the process.
    """
    if config.disk is not None:
        config = replace(config, disk=replace(config.disk, daemon=_this_daemon()))
    return await RemoteEngine.start(partial(start_child, "engine.remote"), config, report)


def join_ranks(model: str, address: tuple[str, int], key_file: Path, report: Report) -> None:
    """Compute a part of the model of a daemon on another machine, whenever that is there, until
    this is interrupted. The model is fetched if need be. Raises ModelError.
    """
    try:
        key = read_key(key_file)
    except ValueError as error:
        raise ModelError(f"--key-file: {error}") from error
    checkpoint = find_checkpoint(model, download=True)
    join_for_ever(str(checkpoint), Address(*address), key, report)


@cache
def _this_daemon() -> str:
    """The name of this daemon: engines that this process starts share a disk cache's directory."""
    return new_daemon()


def clear_unloaded(disk: DiskCacheConfig, fingerprint: str = "") -> int:
    """Clear what models that this process has not loaded have on disk: all of them, with what
    earlier daemons left, or the one whose card has this fingerprint. Returns how many bytes of disk
    that frees. Raises ModelError where another daemon uses the directory.
    """
    prefix = f"{fingerprint} " if fingerprint else ""
    try:
        return clear_unopened(disk.directory, _this_daemon(), prefix)
    except DiskError as error:
        raise ModelError(str(error)) from error


def check_directory(disk: DiskCacheConfig) -> None:
    """Raise ModelError where another daemon uses the disk cache's directory, which is made."""
    try:
        with wrap_errors(disk.directory), joined(disk.directory, _this_daemon()):
            return
    except DiskError as error:
        raise ModelError(str(error)) from error


def free_bytes() -> int:
    """The free memory that MLX reports. Raises ModelError if it does not start."""
    answer = _memory()
    assert isinstance(answer, int), "without a configuration the answer is a number"
    return answer


def needed_memory(config: EngineConfig, budget_bytes: int, storage_bytes: int) -> ModelMemory:
    """The memory that a downloaded model takes. Reads no weights.

    Of `budget_bytes` for all models, `storage_bytes` are for its KV cache and states unless the
    settings specify them. Raises ModelError.
    """
    config = replace(config, memory_bytes=budget_bytes)
    answer = _memory(CONFIG.dump_json(config).decode(), str(storage_bytes))
    assert isinstance(answer, ModelMemory), "with a configuration the answer has the parts"
    return answer


def _memory(*needed: str) -> int | ModelMemory:
    """The answer of a helper process. Raises ModelError."""
    connection, process = start_child(_HELPER, "memory", *needed)
    with connection, connection.makefile("rb") as file:
        received = file.read()
    process.wait()
    if not received:
        raise ModelError("MLX does not start")
    answer = ANSWER.validate_json(received)
    if not isinstance(answer, int | ModelMemory):
        raise ModelError(str(answer))
    return answer


async def fetch_repository(repository: str, progress: Progress) -> None:
    """Fetch a checkpoint into the Hugging Face cache, if it is not there yet.

    `progress` is called on the event loop. Raises ModelError. Cancelled, it ends the process.
    """
    connection, process = await asyncio.to_thread(start_child, _HELPER, "fetch", repository)
    try:
        reader, writer = await asyncio.open_connection(sock=connection)
        try:
            async for line in reader:
                match ANSWER.validate_json(line):
                    case done_bytes, total_bytes:
                        progress(done_bytes, total_bytes)
                    case None:
                        return
                    case error:
                        raise ModelError(str(error))
        finally:
            writer.close()
    finally:
        with suppress(ProcessLookupError, PermissionError):  # all of the group has ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    raise ModelError("the download's process has ended")
