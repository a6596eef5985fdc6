"""What the daemons of this process count, and what they have in memory."""

import gc
import time
import tracemalloc
from collections.abc import Callable, Iterator

import pytest

from server import app
from server.fairness import Budget
from server.settings import Settings
from tests.polling import until

SETTLED_BYTES = 20_000


@pytest.fixture
def budgets(monkeypatch: pytest.MonkeyPatch) -> list[Budget]:
    """The budgets of bodies and of answers of the daemons that the test starts."""
    found: list[Budget] = []

    def kept(make: Callable[[Settings], Budget]) -> Callable[[Settings], Budget]:
        def made(settings: Settings) -> Budget:
            found.append(budget := make(settings))
            return budget

        return made

    for name in ("body_budget", "output_budget"):
        monkeypatch.setattr(app, name, kept(getattr(app, name)))
    return found


@pytest.fixture
def traced() -> Iterator[Callable[[], int]]:
    """Returns the bytes of Python's memory that is in use, when the frames of workers are gone."""

    def traced_bytes() -> int:
        found = [0, 0]

        def is_settled() -> bool:
            time.sleep(0.02)
            gc.collect()
            found[:] = found[1], tracemalloc.get_traced_memory()[0]
            return abs(found[1] - found[0]) < SETTLED_BYTES

        until(is_settled)
        return found[1]

    tracemalloc.start()
    try:
        yield traced_bytes
    finally:
        tracemalloc.stop()
