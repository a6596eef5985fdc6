"""What is given to the device before a step is collected, and what after."""

from collections.abc import Iterator

import mlx.core as mx

from engine.mlx_backend.launch import Laid, LaunchAhead, LaunchWhenIdle


def forwards(laid: list[int]) -> Iterator[Laid]:
    """Three, which note when they are laid out."""
    for number in range(3):
        laid.append(number)
        beginning = mx.ones(4) * number
        yield Laid([beginning.sum()], [beginning])


def test_of_a_step_the_first_layer_goes_ahead_and_nothing_else_is_laid_out() -> None:
    laid = list[int]()
    rest = LaunchAhead().begin(forwards(laid))
    assert laid == [0]
    LaunchAhead().finish(rest)
    assert laid == [0, 1, 2]


def test_a_step_without_forwards_is_launched_too() -> None:
    launch = LaunchAhead()
    launch.finish(launch.begin(iter(())))


def test_behind_an_idle_device_all_goes_at_once() -> None:
    laid = list[int]()
    rest = LaunchWhenIdle().begin(forwards(laid))
    assert laid == [0, 1, 2]
    assert list(rest) == []
