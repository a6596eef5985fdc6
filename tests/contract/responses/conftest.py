"""A daemon that reasons and calls as Hermes does, and what its model is given and says."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from tests.contract.fake_engine import FakeEngine
from tests.contract.test_tools import Daemon, daemon

Created = Callable[..., Any]
Template = Callable[[], tuple[Sequence[Mapping[str, Any]], dict[str, Any]]]


@pytest.fixture(scope="package")
def shared_hermes(no_settings_from_outside: None) -> Iterator[Daemon]:
    with daemon(tool_parser="hermes", keepalive_seconds=0.2) as made:
        yield made


@pytest.fixture
def hermes(shared_hermes: Daemon) -> Daemon:
    """The daemon, with its records fresh, and a model that says "Fine."."""
    blank = FakeEngine()
    for name in ("submitted", "at_gate", "aborted"):
        setattr(shared_hermes.engine, name, getattr(blank, name))
    shared_hermes.say("Fine.")
    return shared_hermes


@pytest.fixture
def create(hermes: Daemon) -> Created:
    """Ask for a response."""

    def created(**fields: Any) -> Any:
        return hermes.client.responses.create(**{"model": "bytes", "input": "Hi"} | fields)

    return created
