"""Starts engines, and looks at what there is for them: models, the machine."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

from engine.api import Engine, ModelError, Telemetry
from engine.child_process import start_child
from engine.mlx_backend.backend import describe_machine
from engine.mlx_backend.loading.needs import needed_bytes
from engine.mlx_backend.loading.source import (
    DEFAULT_NAME,
    Progress,
    fetch_checkpoint,
    find_checkpoint,
)
from engine.remote.engine import RemoteEngine
from engine.types.settings import EngineConfig
from kvstore.tier.disk.folder import new_daemon

__all__ = [
    "DEFAULT_NAME",
    "ModelError",
    "Progress",
    "describe_machine",
    "fetch_checkpoint",
    "find_checkpoint",
    "free_bytes",
    "launch",
    "needed_bytes",
]

Report = Callable[[str], None]
"""Takes a line on how loading goes."""


async def launch(config: EngineConfig, telemetry: Telemetry, report: Report) -> Engine:
    """Load the model in a process of its own. Returns when it is ready.

    Raises whatever loading raises, with a message for the user. Cancelled, it ends the process.
    """
    if config.disk is not None:
        config = replace(config, disk=replace(config.disk, daemon=_this_daemon()))
    return await RemoteEngine.start(
        partial(start_child, "engine.remote"), config, telemetry, report
    )


def free_bytes() -> int:
    """How much memory MLX finds free. Asks a process that ends then: the server imports no MLX.

    Raises ModelError where MLX does not start.
    """
    connection, process = start_child("engine.mlx_backend.host")
    with connection, connection.makefile("rb") as answer:
        said = answer.read()
    if process.wait() or not said:
        raise ModelError("MLX does not say how much memory is free")
    return int(said)


@cache
def _this_daemon() -> str:
    """All engines that this process starts share a disk cache's directory."""
    return new_daemon()
