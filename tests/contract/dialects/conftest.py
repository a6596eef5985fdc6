from collections.abc import Iterator

import pytest

from tests.contract.dialects.adapters import DIALECTS, Dialect
from tests.contract.fake_engine import Gate
from tests.contract.scripted import Daemon

KEEPALIVE_SECONDS = 0.01
STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@pytest.fixture(params=DIALECTS, ids=repr)
def dialect(request: pytest.FixtureRequest) -> Dialect:
    found: Dialect = request.param
    return found


@pytest.fixture(
    params=[dialect for dialect in DIALECTS if dialect.has_tools],
    ids=repr,
)
def calling(request: pytest.FixtureRequest) -> Dialect:
    """Those that have a chat template, reasoning, calls and schemas."""
    found: Dialect = request.param
    return found


@pytest.fixture
def gate() -> Iterator[Gate]:
    """Opened at the end, so that nothing hangs in the daemon."""
    gate = Gate()
    yield gate
    gate.open()


@pytest.fixture(scope="module")
def shared_slow(no_settings_from_outside: None) -> Iterator[Daemon]:
    with Daemon.serving(keepalive_seconds=KEEPALIVE_SECONDS) as made:
        yield made


@pytest.fixture
def slow(shared_slow: Daemon) -> Daemon:
    """A daemon that keeps streams alive every 10 ms, its script and records fresh."""
    shared_slow.engine.reset()
    return shared_slow
