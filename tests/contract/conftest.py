"""A daemon over the fake engine, and clients. Another engine can stand in: override `base_url`."""

import logging
from collections.abc import Callable, Iterator
from logging import LogRecord
from logging.handlers import QueueHandler
from queue import Queue
from typing import Any

import httpx
import pytest

from engine.values.settings import EngineConfig
from server.settings import CLIENT_KEY_VARIABLE, Settings
from tests.contract.daemon import running
from tests.contract.fake_engine import FakeEngine
from tests.contract.scripted import CLIENT_SECONDS, Daemon, StrictClient, strict_client
from tests.hosting import loaded

ChatBody = Callable[..., dict[str, Any]]


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
    shared_engine.reset()
    return shared_engine


@pytest.fixture(scope="session")
def shared_hermes(no_settings_from_outside: None) -> Iterator[Daemon]:
    with Daemon.serving() as made:
        yield made


@pytest.fixture
def hermes(shared_hermes: Daemon) -> Daemon:
    """A model that reasons and writes its calls as Hermes does, its script and records fresh."""
    shared_hermes.engine.reset()
    return shared_hermes


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
