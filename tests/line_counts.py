"""How many lines of Python something executes: a measure of its cost that no machine changes."""

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


def lines_of(act: Callable[[], object]) -> int:
    """The lines that this thread executes for it."""
    with counted_lines() as n_lines:
        act()
        return n_lines[0]


@contextmanager
def counted_lines(part: str = "") -> Iterator[list[int]]:
    """Counts the lines that are executed by this thread, and by threads that begin within, of files
    with `part` in their path.
    """
    n_lines = [0]

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if part not in frame.f_code.co_filename:
            return None
        n_lines[0] += event == "line"
        return trace

    before = sys.gettrace()
    gc.disable()  # Hypothesis has Python run at every collection
    threading.settrace(trace)
    sys.settrace(trace)
    try:
        yield n_lines
    finally:
        sys.settrace(before)
        threading.settrace(before)
        gc.enable()
