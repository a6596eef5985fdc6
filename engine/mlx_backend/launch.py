"""When a step's forwards are given to the device.

MLX builds a forward lazily: nothing of it runs until it is launched with `mx.async_eval`. A write
to an arena is in place as long as nobody else refers to the array, and a forward in flight may.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class PendingForward:
    """A forward that has been built and not launched: the arrays to evaluate.

    `first_layer`: those of its first layer, which may be launched ahead of the others.
    """

    arrays: list[mx.array]
    first_layer: list[mx.array] = field(default_factory=list)


class Launch(Protocol):
    """Gives a step's forwards to the device, each before the next is built."""

    def begin(self, forwards: Iterator[PendingForward]) -> Iterator[PendingForward]:
        """Launch enough to keep the device busy, without waiting for the step before.

        Returns the rest.
        """
        ...

    def finish(self, rest: Iterator[PendingForward]) -> None:
        """Launch the rest. Returns while the device computes."""
        ...


class LaunchAhead:
    """Launches a step behind the one in flight. For the CPU, where a task in flight lets go of its
    inputs as soon as it has run, and a pool is written a whole forward after it was last read.

    MLX takes about fifty operations ahead of the CPU, and waits. With a whole forward it would wait
    until that is nearly computed, and the step before would be collected so much later. So only the
    first layer goes ahead.
    """

    def begin(self, forwards: Iterator[PendingForward]) -> Iterator[PendingForward]:
        first = next(forwards, None)
        if first is None:
            return iter(())
        mx.async_eval(first.first_layer)
        return chain([PendingForward(first.arrays)], forwards)

    def finish(self, rest: Iterator[PendingForward]) -> None:
        for forward in rest:
            mx.async_eval(forward.arrays)


class LaunchWhenIdle:
    """Launches each forward when all that is in flight has been computed. For Metal and CUDA, which
    keep the buffers of a command buffer or graph until it completes: a pool in one of them would be
    copied.
    """

    def begin(self, forwards: Iterator[PendingForward]) -> Iterator[PendingForward]:
        for forward in forwards:
            mx.synchronize()
            mx.async_eval(forward.arrays)
        return iter(())

    def finish(self, rest: Iterator[PendingForward]) -> None:
        """There is none."""


def launch_for(device: mx.Device) -> Launch:
    """The launch that serves on a device."""
    return LaunchAhead() if device == mx.cpu else LaunchWhenIdle()
