"""A daemon over the fake engine, and clients. Another engine can stand in: override `base_url`."""

import logging
from collections.abc import Callable, Iterator
from logging import LogRecord
from logging.handlers import QueueHandler
from queue import Queue
from typing import Any

import httpx
import pytest
from anthropic import Anthropic
from openai import OpenAI

from engine.values.settings import EngineConfig
from server.settings import CLIENT_KEY_VARIABLE, Settings
from tests.contract.daemon import running
from tests.contract.fake_engine import FakeEngine, Script
from tests.hosting import loaded

StrictClient = Any
"""An OpenAI client. It checks its answers' types as it runs, more strictly than its unions say."""

AnthropicClient = Any
"""The same of Anthropic's."""

ChatBody = Callable[..., dict[str, Any]]

CLIENT_SECONDS = 20.0


@pytest.fixture(scope="session", autouse=True)
def no_settings_from_outside() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as environment:
        environment.delenv(CLIENT_KEY_VARIABLE, raising=False)
        for name in Settings.model_fields:
            environment.delenv(f"ROOTSTOCK_{name.upper()}", raising=False)
        yield


@pytest.fixture(scope="session")
def shared_engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="session")
def base_url(shared_engine: FakeEngine, no_settings_from_outside: None) -> Iterator[str]:
    with running(shared_engine, Settings(port=0)) as url:
        yield url


@pytest.fixture(scope="session")
def demo_url(no_settings_from_outside: None) -> Iterator[str]:
    """A daemon with the embedded model and default settings, one for all modules of a worker."""
    engine = loaded(EngineConfig(model="", kv_cache_bytes=16 << 20))
    with running(engine, Settings(port=0)) as url:
        yield url


@pytest.fixture
def engine(shared_engine: FakeEngine) -> FakeEngine:
    """The engine behind `base_url`, its script and records fresh."""
    blank = FakeEngine()
    for name in ("submitted", "at_gate", "aborted", "cleared"):
        setattr(shared_engine, name, getattr(blank, name))
    shared_engine.script = Script()
    shared_engine.latencies = blank.latencies
    return shared_engine


@pytest.fixture(scope="session")
def client(base_url: str) -> Iterator[StrictClient]:
    with strict_client(base_url) as client:
        yield client


@pytest.fixture(scope="session")
def http(base_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=base_url, timeout=CLIENT_SECONDS) as client:
        yield client


@pytest.fixture(scope="session")
def model(client: StrictClient) -> str:
    """The name under which the daemon serves whatever it serves."""
    return str(client.models.list().data[0].id)


@pytest.fixture
def departures() -> Iterator["Queue[LogRecord]"]:
    """The access log's records of clients that left before their answer."""
    records = Queue[LogRecord]()
    handler = QueueHandler(records)
    handler.addFilter(lambda record: "client-left" in record.getMessage())
    access = logging.getLogger("rootstock.access")
    level = access.level
    access.setLevel(logging.INFO)
    access.addHandler(handler)
    yield records
    access.removeHandler(handler)
    access.setLevel(level)


@pytest.fixture
def chat(model: str) -> ChatBody:
    """A chat body with a few fields of the test's own."""

    def body(**fields: Any) -> dict[str, Any]:
        return {"model": model, "messages": [{"role": "user", "content": "Hi"}], **fields}

    return body


def strict_client(base_url: str, api_key: str = "none") -> StrictClient:
    """The SDK, with responses checked against its types and no retries to hide errors."""
    return OpenAI(
        base_url=f"{base_url}/v1",
        api_key=api_key,
        max_retries=0,
        timeout=CLIENT_SECONDS,
        _strict_response_validation=True,
    )


def anthropic_client(base_url: str, api_key: str = "none") -> AnthropicClient:
    """Anthropic's SDK, likewise."""
    return Anthropic(
        base_url=base_url,
        api_key=api_key,
        max_retries=0,
        timeout=CLIENT_SECONDS,
        _strict_response_validation=True,
    )
