"""What the tests expect of each device, GPUs included where there is none."""

import mlx.core as mx

from engine.mlx_backend.launch import LaunchAhead, LaunchWhenIdle
from tests.devices import GPU, launches

CPU = mx.Device(mx.cpu, 0)


def test_a_cpu_runs_under_both_launches_and_a_gpu_under_the_one_that_serves() -> None:
    assert [type(launch) for launch in launches(CPU)] == [LaunchAhead, LaunchWhenIdle]
    assert [type(launch) for launch in launches(GPU)] == [LaunchWhenIdle]
