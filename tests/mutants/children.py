"""Runs pytest in a forked process that has the large libraries imported already."""

import importlib
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest

LIBRARIES: Final = (
    "anthropic",
    "blake3",
    "fastapi",
    "httpx",
    "huggingface_hub",
    "hypothesis",
    "jinja2",
    "jsonschema",
    "llguidance",
    "mlx.nn",
    "mlx_lm",
    "numpy",
    "openai",
    "prometheus_client",
    "prompt_toolkit",
    "pydantic_settings",
    "rich.console",
    "starlette.testclient",
    "transformers",
    "typer",
    "uvicorn",
)
PROJECT: Final = ("kvstore", "engine", "measuring", "server", "rootstock_serve", "tests")
OPTIONS: Final = (
    *("-q", "-n", "0", "-p", "no:cacheprovider"),
    # Libraries that are imported already need no rewritten assertions.
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),
)
MEMORY_BYTES: Final = 6 << 30
TIMED_OUT: Final = -1


def import_libraries() -> None:
    """Import all that is not the project's, with the BLAS of the daemon before MLX."""
    importlib.import_module("engine.mlx_backend.cpu.blas").load_blas()
    for library in LIBRARIES:
        importlib.import_module(library)


def run_pytest(
    tree: Path,
    arguments: Sequence[str],
    plugin: object,
    timeout_seconds: float,
    output: Path,
    around: Callable[[Callable[[], int]], int] = lambda run: run(),
) -> int:
    """Run the tests of `tree` on the source of `tree`. Returns pytest's exit code, or TIMED_OUT.

    What it writes goes to the file `output`. Random tests repeat their examples, as in CI. `around`
    gets what runs pytest, and runs it.
    """
    pid = os.fork()
    if not pid:
        code = 3
        try:
            _enter(tree, output)
            code = around(lambda: int(pytest.main([*OPTIONS, *arguments], plugins=[plugin])))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    deadline = time.monotonic() + timeout_seconds
    ended, status = os.waitpid(pid, os.WNOHANG)
    while not ended and time.monotonic() < deadline:
        time.sleep(0.02)
        ended, status = os.waitpid(pid, os.WNOHANG)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # what the tests started and left, too
    if ended:
        return os.waitstatus_to_exitcode(status)
    os.waitpid(pid, 0)
    return TIMED_OUT


def _enter(tree: Path, output: Path) -> None:
    """Make this process one that was started in `tree`, with nothing of the project imported."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
    os.dup2(1, 2)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    os.chdir(tree)
    os.environ |= {"PYTHONPATH": str(tree), "HYPOTHESIS_PROFILE": "fast", "CI": "1"}
    sys.path[:] = [str(tree), *(path for path in sys.path if not (Path(path) / "kvstore").is_dir())]
    for name in [name for name in sys.modules if name.split(".")[0] in PROJECT]:
        del sys.modules[name]
