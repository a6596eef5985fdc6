"""When forwards that have been laid out are given to the device.

An arena's write is in place as long as nobody else refers to the array. A forward in flight may.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class Laid:
    """A forward's arrays, and those that may go ahead: its first layer's."""

    arrays: list[mx.array]
    beginning: list[mx.array] = field(default_factory=list)


class Launch(Protocol):
    """Gives a step's forwards to the device, each before the next is laid out."""

    def begin(self, forwards: Iterator[Laid]) -> Iterator[Laid]:
        """So much that the device has something to do, without waiting for the step before.

        Returns the rest.
        """
        ...

    def finish(self, rest: Iterator[Laid]) -> None:
        """All else. Returns while the device computes."""
        ...


class LaunchAhead:
    """Behind what is in flight. For the CPU, where a task in flight lets go of its inputs as soon
    as it has run, and a pool is written a whole forward after it was last read.

    MLX takes about fifty operations ahead of the CPU, and waits. With a whole forward it would wait
    until that is nearly computed, and the step before would be collected so much later. So only the
    first layer goes ahead.
    """

    def begin(self, forwards: Iterator[Laid]) -> Iterator[Laid]:
        first = next(forwards, None)
        if first is None:
            return iter(())
        mx.async_eval(first.beginning)
        return chain([Laid(first.arrays)], forwards)

    def finish(self, rest: Iterator[Laid]) -> None:
        for laid in rest:
            mx.async_eval(laid.arrays)


class LaunchWhenIdle:
    """When all that is in flight has been computed. For Metal and CUDA, which keep the buffers of a
    command buffer or graph until it completes: a pool in one of them would be copied.
    """

    def begin(self, forwards: Iterator[Laid]) -> Iterator[Laid]:
        for laid in forwards:
            mx.synchronize()
            mx.async_eval(laid.arrays)
        return iter(())

    def finish(self, rest: Iterator[Laid]) -> None:
        """There is none."""
