"""What is given to the device before a step is collected, and what after."""

from collections.abc import Iterator

import mlx.core as mx

from engine.mlx_backend.runner import Launch
from engine.mlx_backend.submitted_step import PendingForward


def forwards(built: list[int]) -> Iterator[PendingForward]:
    """Three, which note when they are built."""
    for number in range(3):
        built.append(number)
        first_layer = mx.ones(4) * number
        yield PendingForward([first_layer.sum()], [first_layer])


def test_of_a_step_the_first_layer_goes_ahead_and_nothing_else_is_built() -> None:
    built = list[int]()
    rest = Launch.AHEAD.begin(forwards(built))
    assert built == [0]
    Launch.AHEAD.finish(rest)
    assert built == [0, 1, 2]


def test_a_step_without_forwards_is_launched_too() -> None:
    launch = Launch.AHEAD
    launch.finish(launch.begin(iter(())))


def test_where_the_device_is_idle_all_is_launched_at_once() -> None:
    built = list[int]()
    rest = Launch.WHEN_IDLE.begin(forwards(built))
    assert built == [0, 1, 2]
    assert list(rest) == []
