"""How often something is measured: so many times, or fewer where that takes too long."""

import time
from collections.abc import Callable, Iterator

LEAST_ROUNDS = 3


def rounds(
    most: int, seconds: float, clock: Callable[[], float] = time.perf_counter
) -> Iterator[int]:
    """Count rounds: no more than `most`, and none is begun after so many seconds but the first."""
    end = clock() + seconds
    for done in range(most):
        if done >= LEAST_ROUNDS and clock() > end:
            return
        yield done
