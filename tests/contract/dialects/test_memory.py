"""What the answers of any dialect keep of their bodies counts as a body until their end."""

from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import pytest

from tests.contract.dialects.adapters import Completions, Dialect
from tests.contract.dialects.conftest import STREAMS
from tests.contract.fake_engine import Gate
from tests.contract.scripted import CLIENT_SECONDS, Daemon
from tests.contract.wire import posted
from tests.polling import WAIT_SECONDS

SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "description": "x" * 45_000}}}
FUNCTIONS = {"functions": [{"name": "f", "parameters": SCHEMA}]}
KEPT: tuple[Mapping[str, Any], ...] = (FUNCTIONS, {"schema": SCHEMA})


@pytest.fixture(scope="module")
def narrow(no_settings_from_outside: None) -> Iterator[Daemon]:
    """A daemon with room for one large body. Its model's template leaves tools out."""
    with Daemon.serving(max_body_bytes=160_000, max_total_body_bytes=190_000) as made:
        yield made


def check_room_for_no_other(narrow: Daemon, dialect: Dialect) -> None:
    """A large body is refused while the answer to another one is written, which keeps less than
    half of what all bodies may have: the larger one is the largest however it arrives.
    """
    narrow.engine.at_gate.get(timeout=WAIT_SECONDS)
    larger = {**dialect.body(), "metadata": {"x": "x" * 150_000}}
    refused = httpx.post(narrow.url + dialect.path, json=larger, timeout=CLIENT_SECONDS)
    assert (refused.status_code, "bodies" in refused.text) == (503, True)


@STREAMS
@pytest.mark.parametrize("fields", KEPT, ids=["functions", "schema"])
def test_what_no_prompt_has_of_it_counts(
    narrow: Daemon, calling: Dialect, gate: Gate, fields: Mapping[str, Any], stream: bool
) -> None:
    narrow.engine.reset()
    narrow.say("Hello", gate=gate)
    with posted(narrow.url, calling.path, {**calling.body(**fields), "stream": stream}):
        check_room_for_no_other(narrow, calling)


@STREAMS
def test_many_prompts_count(narrow: Daemon, gate: Gate, stream: bool) -> None:
    narrow.engine.reset()
    narrow.say("Hello", gate=gate)
    completions = Completions()
    prompts = ["x" * 400] * 25  # four bytes a token
    with posted(narrow.url, completions.path, {"prompt": prompts, "stream": stream}):
        check_room_for_no_other(narrow, completions)
