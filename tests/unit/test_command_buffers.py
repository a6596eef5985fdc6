"""The environment that MLX is imported with on each device."""

import subprocess
import sys
from pathlib import Path

import pytest

from engine.mlx_backend import backend
from engine.mlx_backend.backend import MAX_ELEMENTS, MAX_OPERATIONS, limit_by_operations

ROOT = Path(__file__).parents[2]
INT_BITS = 32
LARGEST_MEMORY_BYTES = 1 << 42
"""4 TiB: more than any machine gives a GPU of Metal or CUDA."""


@pytest.fixture(params=["Metal", "CUDA"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A machine with this GPU, as far as is known before MLX is imported."""
    device: str = request.param
    monkeypatch.setattr(sys, "platform", "darwin" if device == "Metal" else "linux")
    monkeypatch.setattr(backend, "has_cuda_package", lambda: device == "CUDA")
    return device


@pytest.mark.usefixtures("gpu")
def test_on_a_gpu_no_elements_end_a_command_buffer_before_its_operations_do() -> None:
    environment = dict[str, str]()
    limit_by_operations(environment)
    assert environment.keys() == {MAX_ELEMENTS}, "the limit on operations is the user's"
    limit = int(environment[MAX_ELEMENTS])
    assert limit < 2 ** (INT_BITS - 1), "MLX would read a negative number"
    # Elements of a byte each, and operations that each use all the memory there is, three times.
    assert limit > 3 * 100 * (LARGEST_MEMORY_BYTES >> 20)


@pytest.mark.usefixtures("gpu")
def test_the_users_own_limits_stay() -> None:
    environment = {MAX_ELEMENTS: "64", MAX_OPERATIONS: "7"}
    limit_by_operations(environment)
    assert environment == {MAX_ELEMENTS: "64", MAX_OPERATIONS: "7"}


def test_on_a_cpu_the_environment_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(backend, "has_cuda_package", lambda: False)
    environment = dict[str, str]()
    limit_by_operations(environment)
    assert environment == {}


LOAD = """
import os, sys
import engine.mlx_backend.backend as module
from {module} import {function}

def end(environment):
    assert environment is os.environ
    print("mlx.core" in sys.modules)
    raise SystemExit

module.limit_by_operations = end
{call}
"""


@pytest.mark.parametrize(
    ("module", "function", "call"),
    [
        (
            "engine.mlx_backend.backend",
            "load_backend",
            "from engine.values.settings import EngineConfig\n"
            "load_backend(EngineConfig(''), print)",
        ),
        ("measuring.doctor", "cases_of", "cases_of(None)"),
    ],
)
def test_the_limit_is_set_before_mlx_is_imported(module: str, function: str, call: str) -> None:
    """MLX reads it once. Engines and the processes that measure are where it counts."""
    program = LOAD.format(module=module, function=function, call=call)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "False"
