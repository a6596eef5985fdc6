"""Starts engines, and looks at what there is for them: models, the machine."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

from engine.api import Engine, ModelError
from engine.child_process import Free, Needed, Progress, ask, fetch_repository, start_child
from engine.mlx_backend.backend import describe_machine
from engine.mlx_backend.loading.checkpoint import Checkpoint, open_checkpoint
from engine.mlx_backend.loading.source import find_checkpoint, local_checkpoint
from engine.remote.engine import RemoteEngine
from engine.values.settings import EngineConfig
from kvstore.tier.disk.folder import new_daemon

__all__ = [
    "Checkpoint",
    "ModelError",
    "Progress",
    "describe_machine",
    "fetch_repository",
    "find_checkpoint",
    "free_bytes",
    "launch",
    "local_checkpoint",
    "needed_bytes",
    "open_checkpoint",
]

Report = Callable[[str], None]
"""Takes a line on how loading goes."""


async def launch(config: EngineConfig, report: Report) -> Engine:
    """Load the model in a process of its own. Returns when it is ready.

    Raises whatever loading raises, with a message for the user. Cancelled, it ends the process.
    """
    if config.disk is not None:
        config = replace(config, disk=replace(config.disk, daemon=_this_daemon()))
    return await RemoteEngine.start(partial(start_child, "engine.remote"), config, report)


def free_bytes() -> int:
    """How much memory MLX finds free. Raises ModelError where it does not start."""
    return ask(Free())


def needed_bytes(config: EngineConfig, budget_bytes: int, storage_bytes: int) -> int:
    """What the model takes, whose files have been fetched; none of its weights are read.

    Of `budget_bytes` for all models, `storage_bytes` are for its KV cache and states unless the
    settings say how much. Raises ModelError.
    """
    return ask(Needed(replace(config, memory_bytes=budget_bytes), storage_bytes))


@cache
def _this_daemon() -> str:
    """All engines that this process starts share a disk cache's directory."""
    return new_daemon()
