from collections.abc import Iterator
from queue import Queue

import pytest

from tests.contract.fake_engine import Script
from tests.contract.ollama.scripted import Daemon, daemon


@pytest.fixture(scope="package")
def shared_daemon(no_settings_from_outside: None) -> Iterator[Daemon]:
    with daemon() as made:
        yield made


@pytest.fixture
def hermes(shared_daemon: Daemon) -> Daemon:
    """A model that reasons and writes its calls as Hermes does, its script fresh."""
    shared_daemon.engine.script = Script()
    shared_daemon.engine.submitted = Queue()
    return shared_daemon
