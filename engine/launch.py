"""Starts engines, and looks at what there is for them: models, the machine."""

from collections.abc import Callable
from functools import partial

from engine.api import Engine, ModelError, Telemetry
from engine.child_process import start_child
from engine.mlx_backend.backend import describe_machine
from engine.mlx_backend.loading.source import find_checkpoint
from engine.remote.engine import RemoteEngine
from engine.types.settings import EngineConfig

__all__ = ["ModelError", "describe_machine", "find_checkpoint", "launch"]

Report = Callable[[str], None]
"""Takes a line on how loading goes."""


def launch(config: EngineConfig, telemetry: Telemetry, report: Report) -> Engine:
    """Load the model in a process of its own. Returns when it is ready.

    Raises whatever loading raises, with a message for the user.
    """
    return RemoteEngine.start(partial(start_child, "engine.remote"), config, telemetry, report)
