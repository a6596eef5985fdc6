"""The one way in which tests wait for what nobody tells them."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
WAIT_SECONDS = 60.0
"""Bounds every wait for what must come. A wait ends as soon as it has come, so a slow machine needs
a large bound, and a fast one pays for it only where a test fails.
"""


def until(
    look: Callable[[], T],
    holds: Callable[[T], object] = bool,
    seconds: float = WAIT_SECONDS,
) -> T:
    """Look again and again; returns the first value that holds, which is any true one by default.

    Raises AssertionError with the last value after `seconds`.
    """
    deadline = time.monotonic() + seconds
    while not holds(found := look()):
        assert time.monotonic() < deadline, f"still {found!r} after {seconds} s"
        time.sleep(0.001)
    return found
