"""How much the tests try, on how many workers, and what they expect of each device."""

import mlx.core as mx
import pytest

from engine.mlx_backend.loading.selfcheck import GPU_TOLERANCE
from engine.mlx_backend.runner import Launch
from measuring.device import checked_dtypes
from tests import conftest, profiles
from tests.devices import launches, rounding, strategies, tolerance
from tests.golden.test_exact import FLOAT32_BOUND, ULP, bound


@pytest.mark.parametrize(
    ("profile", "n", "share"),
    [("fast", 200, 40), ("fast", 25, 20), ("fast", 2, 2), ("ci", 40, 40), ("nightly", 5, 50)],
)
def test_a_profile_scales_the_examples(
    monkeypatch: pytest.MonkeyPatch, profile: str, n: int, share: int
) -> None:
    monkeypatch.setattr(profiles, "PROFILE", profile)
    assert profiles.examples(n) == share


@pytest.mark.parametrize(
    ("variable", "system", "cores", "workers"),
    [("", "linux", 2, 3), ("", "darwin", 8, 2), ("5", "linux", 2, 5), ("5", "darwin", 8, 5)],
)
def test_the_variable_decides_on_workers_and_macos_has_two(
    monkeypatch: pytest.MonkeyPatch, variable: str, system: str, cores: int, workers: int
) -> None:
    monkeypatch.setenv("PYTEST_XDIST_AUTO_NUM_WORKERS", variable)
    monkeypatch.setattr("sys.platform", system)
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    assert conftest.pytest_xdist_auto_num_workers() == workers


CPU, GPU = mx.Device(mx.cpu, 0), mx.Device(mx.gpu, 0)


def test_a_cpu_runs_under_both_launches_and_a_gpu_under_the_one_that_serves() -> None:
    assert launches(CPU) == [Launch.AHEAD, Launch.WHEN_IDLE]
    assert launches(GPU) == [Launch.WHEN_IDLE]


def test_a_gpu_runs_no_attention_of_a_cpu() -> None:
    assert strategies(CPU) == ("gather", "cascade", "paged")
    assert strategies(GPU) == ("gather", "paged")


def test_a_gpu_is_held_to_the_tolerance_of_the_check_at_load() -> None:
    assert tolerance(1e-4, CPU) == 1e-4
    assert tolerance(1e-4, GPU) == GPU_TOLERANCE
    assert tolerance(0.05, GPU) == 0.05, "never stricter than a CPU"


def test_bits_are_compared_on_a_cpu_alone() -> None:
    assert rounding(1e-5, CPU) == 0
    assert rounding(1e-5, GPU) == 1e-5
    assert bound("llama", "bfloat16", CPU) == 0
    assert bound("llama", "float32", CPU) == FLOAT32_BOUND
    assert bound("llama", "bfloat16", GPU) == ULP["bfloat16"]
    assert bound("llama", "float32", GPU) == GPU_TOLERANCE


def test_loads_are_checked_in_half_precision_on_a_gpu_as_well() -> None:
    assert checked_dtypes(CPU) == (mx.float32,)
    assert checked_dtypes(GPU) == (mx.float32, mx.bfloat16)
