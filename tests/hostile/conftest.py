"""What the daemons of this process count, and what they have in memory."""

from collections.abc import Callable, Iterator

import pytest

from server.fairness import Budget
from tests.hostile.held import counted, tracing


@pytest.fixture
def budgets() -> Iterator[list[Budget]]:
    """The budgets of bodies and of answers of the daemons that the test starts."""
    with counted() as found:
        yield found


@pytest.fixture
def traced() -> Iterator[Callable[[], int]]:
    """Returns the bytes of Python's memory that is in use, when the frames of workers are gone."""
    with tracing() as found:
        yield found
