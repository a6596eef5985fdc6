"""The process that measures a section of `doctor --measure`: it gets one task, and imports MLX."""

import warnings
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection

from engine.mlx_backend.environment import mlx_imports
from measuring.doctor import Cases, Task, serve


def cases_of(task: Task) -> Cases:
    """The cases of the task's section. Raises ModelError, and NotApplicable if the device has
    nothing that the section measures.
    """
    with mlx_imports():
        from measuring import attention_choice, device, engine_step  # noqa: PLC0415 - BLAS first

    config, sizes = task.config, task.config.sizes
    sections: dict[str, Callable[[], Cases]] = {
        "machine": lambda: {
            "machine": device.machine_facts,
            "model": partial(engine_step.model_facts, config.engine),
        },
        "attention": lambda: device.attention_cases(sizes),
        "attention choice": lambda: attention_choice.choice_cases(config),
        "layouts": lambda: device.layout_cases(sizes),
        "step": lambda: engine_step.step_cases(config),
        "memory": lambda: engine_step.memory_cases(config),
        "donation": lambda: device.donation_cases(sizes, task.scratch),
        "command buffers": lambda: engine_step.command_buffer_cases(config),
        "load check": lambda: device.load_check_cases(sizes, task.scratch),
    }
    return sections[task.section]()


def main(descriptor: str) -> None:
    """Serve the driver at the other end of the socket with this file descriptor."""
    warnings.simplefilter("ignore")
    with Connection(int(descriptor)) as connection:
        serve(connection, cases_of)
