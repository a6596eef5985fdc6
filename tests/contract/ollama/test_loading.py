"""Streams of models that are not loaded: lines without text keep the connection open meanwhile."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from engine.api import ModelError
from server.models.registry import ModelRegistry
from tests.contract.daemon import serving
from tests.contract.fake_engine import Gate
from tests.contract.scripted import CLIENT_SECONDS
from tests.contract.several import HI, Engines, needs, settings_of

STREAMS = pytest.mark.parametrize(
    ("path", "body", "empty"),
    [
        ("/api/chat", {"messages": [HI]}, {"message": {"role": "assistant", "content": ""}}),
        ("/api/generate", {"prompt": "hi"}, {"response": ""}),
    ],
)


@dataclass
class LoadingDaemon:
    """A daemon whose engines start when `gate` is opened, and send a keep-alive every 10 ms."""

    url: str
    engines: Engines
    gate: Gate = field(default_factory=Gate)

    @contextmanager
    def stream(self, path: str, **body: Any) -> Iterator[Iterator[dict[str, Any]]]:
        """The lines of the answer, read as they come."""
        asked = {"model": "two", **body}
        with httpx.stream("POST", self.url + path, json=asked, timeout=CLIENT_SECONDS) as answer:
            assert answer.status_code == 200
            assert answer.headers["content-type"] == "application/x-ndjson"
            yield map(json.loads, answer.iter_lines())


@pytest.fixture
def loading() -> Iterator[LoadingDaemon]:
    """The model `one` is loaded, and `two` is not."""
    settings, engines = settings_of(keepalive_seconds=0.01), Engines()
    with serving(ModelRegistry(settings, engines, needs), settings) as url:
        made = LoadingDaemon(url, engines)
        engines.gate = made.gate
        yield made
        made.gate.open()


@STREAMS
def test_a_stream_has_empty_lines_while_its_model_is_loaded(
    loading: LoadingDaemon, path: str, body: dict[str, Any], empty: dict[str, Any]
) -> None:
    with loading.stream(path, **body) as lines:
        first = next(lines)
        loading.gate.open()
        *_, last = lines
    assert first.pop("created_at")
    assert first == {"model": "two", "done": False, **empty}
    assert (last["done"], last["done_reason"]) == (True, "stop")


@STREAMS
def test_a_failure_after_empty_lines_is_the_last_line(
    loading: LoadingDaemon, path: str, body: dict[str, Any], empty: dict[str, Any]
) -> None:
    loading.engines.failure = ModelError("no weights")
    with loading.stream(path, **body) as lines:
        next(lines)
        loading.gate.open()
        *_, last = lines
    assert last == {"error": "The model 'two' cannot be used: no weights."}


def test_a_load_without_a_question_ends_its_stream(loading: LoadingDaemon) -> None:
    with loading.stream("/api/generate") as lines:
        next(lines)
        loading.gate.open()
        *_, last = lines
    assert (last["model"], last["done"], last["done_reason"]) == ("two", True, "load")


@STREAMS
def test_a_load_that_fails_at_once_has_a_status(
    path: str, body: dict[str, Any], empty: dict[str, Any]
) -> None:
    settings, engines = settings_of(), Engines()
    with serving(ModelRegistry(settings, engines, needs), settings) as url:
        engines.failure = ModelError("no weights")
        answer = httpx.post(url + path, json={"model": "two", **body}, timeout=CLIENT_SECONDS)
    assert answer.status_code == 503
    assert answer.json() == {"error": "The model 'two' cannot be used: no weights."}
