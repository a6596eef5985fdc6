"""The process that measures a section: `python -m engine.measuring.worker SOCKET`.

The device may end it: Metal does when a command buffer gets no memory. What it has sent by then
counts, and another process continues after the case that ended it.
"""

import getpass
import platform
import re
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection

from engine.api import one_line
from engine.measuring.messages import MEASURED, NAMES, TASK, Cases, Figures, MeasuredCase, Task
from engine.mlx_backend.backend import mlx_imports

_PATH = re.compile(r"\S*[/\\]\S*")
_HIDDEN = "..."


def serve(connection: Connection, begin: Callable[[Task], Cases]) -> None:
    """Receive a task and answer it with the cases that `begin` makes for it.

    A section that cannot begin answers with one case, which has the section's name and the reason.
    """
    task = TASK.validate_json(connection.recv_bytes())
    try:
        cases = begin(task)
    except (Exception, SystemExit) as error:
        connection.send_bytes(NAMES.dump_json([task.section]))
        failed = MeasuredCase(task.section, {}, 0, reason(error))
        connection.send_bytes(MEASURED.dump_json(failed))
        return
    names = list(cases)
    connection.send_bytes(NAMES.dump_json(names))
    for name in names[task.first : task.stop]:
        connection.send_bytes(MEASURED.dump_json(_measured(name, cases[name])))


def _measured(name: str, measure: Callable[[], Figures]) -> MeasuredCase:
    started, problem = time.perf_counter(), ""
    figures: Figures = {}
    try:
        figures = measure()
    # Models raise all kinds of exceptions, and one exits when a package of its own is missing.
    except (Exception, SystemExit) as error:
        problem = reason(error)
    return MeasuredCase(name, figures, time.perf_counter() - started, problem)


def reason(error: BaseException) -> str:
    """The error's type and message on one line, without words that have a slash in them, the
    user's name and the host's.
    """
    message = one_line(error).removeprefix(type(error).__name__).strip()
    if not message:
        return type(error).__name__
    message = _PATH.sub(_HIDDEN, message)
    for name in filter(None, (_user(), platform.node(), platform.node().partition(".")[0])):
        whole_word = rf"(?<!\w){re.escape(name)}(?!\w)"
        message = re.sub(whole_word, _HIDDEN, message, flags=re.IGNORECASE)
    return f"{type(error).__name__}: {message}"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in containers
        return ""


def cases_of(task: Task) -> Cases:
    """The cases of the task's section. Raises ModelError, and NotApplicable if the device has
    nothing of the kind.
    """
    with mlx_imports():
        from engine.measuring import attention, device, engine_step  # noqa: PLC0415 - BLAS first

    config, sizes = task.config, task.config.sizes
    sections: dict[str, Callable[[], Cases]] = {
        "machine": lambda: {
            "machine": device.machine_facts,
            "model": partial(engine_step.model_facts, config.engine),
        },
        "attention": lambda: attention.attention_cases(sizes),
        "layouts": lambda: attention.layout_cases(sizes),
        "step": lambda: engine_step.step_cases(config),
        "memory": lambda: engine_step.memory_cases(config),
        "donation": lambda: device.donation_cases(sizes, task.scratch),
        "command buffers": lambda: engine_step.command_buffer_cases(config),
        "load check": lambda: device.load_check_cases(sizes, task.scratch),
    }
    return sections[task.section]()


def main(descriptor: str) -> None:
    """Serve the connection with that file descriptor."""
    warnings.simplefilter("ignore")
    with Connection(int(descriptor)) as connection:
        serve(connection, cases_of)


if __name__ == "__main__":
    main(sys.argv[1])
