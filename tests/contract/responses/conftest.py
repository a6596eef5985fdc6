"""A daemon that reasons and calls as Hermes does, and what its model is given and says."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.contract.scripted import WEATHER, Daemon

WEATHER_TOOL = {"type": "function", "strict": False, **WEATHER["function"]}  # type: ignore[dict-item]
PATCH_TOOL = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Change files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "begin"'},
}

Created = Callable[..., Any]


@pytest.fixture
def hermes(hermes: Daemon) -> Daemon:
    """The shared daemon, whose model says "Fine."."""
    hermes.say("Fine.")
    return hermes


@pytest.fixture
def create(hermes: Daemon) -> Created:
    """Ask for a response."""

    def created(**fields: Any) -> Any:
        return hermes.openai.responses.create(**{"model": "bytes", "input": "Hi"} | fields)

    return created
