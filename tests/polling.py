"""The one way in which tests wait for what nobody tells them."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
PATIENCE_SECONDS = 20.0


def until(
    look: Callable[[], T],
    holds: Callable[[T], object] = bool,
    seconds: float = PATIENCE_SECONDS,
) -> T:
    """Look again and again; returns the first value that holds, which is any true one by default.

    Raises AssertionError with the last value after `seconds`.
    """
    deadline = time.monotonic() + seconds
    while not holds(found := look()):
        assert time.monotonic() < deadline, f"still {found!r} after {seconds} s"
        time.sleep(0.001)
    return found
