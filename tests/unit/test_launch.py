"""What is given to the device before a step is collected, and what after."""

from collections.abc import Iterator

import mlx.core as mx

from engine.mlx_backend.runner import LaunchAhead, LaunchWhenIdle, PendingForward


def forwards(built: list[int]) -> Iterator[PendingForward]:
    """Three, which note when they are built."""
    for number in range(3):
        built.append(number)
        first_layer = mx.ones(4) * number
        yield PendingForward([first_layer.sum()], [first_layer])


def test_of_a_step_the_first_layer_goes_ahead_and_nothing_else_is_built() -> None:
    built = list[int]()
    rest = LaunchAhead().begin(forwards(built))
    assert built == [0]
    LaunchAhead().finish(rest)
    assert built == [0, 1, 2]


def test_a_step_without_forwards_is_launched_too() -> None:
    launch = LaunchAhead()
    launch.finish(launch.begin(iter(())))


def test_behind_an_idle_device_all_goes_at_once() -> None:
    built = list[int]()
    rest = LaunchWhenIdle().begin(forwards(built))
    assert built == [0, 1, 2]
    assert list(rest) == []
