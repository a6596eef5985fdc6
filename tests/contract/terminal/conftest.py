"""For commands that are run at a terminal."""

import signal
from collections.abc import Iterator

import pytest

from tests.contract.fake_engine import FakeEngine


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Processes begin as in a terminal, though a shell's background job ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def url(base_url: str, engine: FakeEngine) -> str:
    """Of the fake engine's daemon, as commands are given it."""
    return f"{base_url}/v1"
