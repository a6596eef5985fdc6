"""One client's flood and another's short request, over a socket.

The engine is the real one behind its thread; the model is hashes whose steps the test lets through.
"""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Semaphore

import httpx
import pytest

from engine.core.inbox import Inbox
from server.settings import Settings
from tests.contract.daemon import running
from tests.contract.dialects.adapters import BODIES
from tests.contract.fake_engine import FakeEngine
from tests.contract.scripted import CLIENT_SECONDS
from tests.unit.engine_harness import prompt
from tests.unit.threaded_harness import Setup

FLOOD = 20
PROXY = "127.0.0.1"


class Clients:
    """Behind a proxy, so that each has an address of its own. Their requests are one by one known
    to have reached the engine's inbox, which is emptied between two steps."""

    def __init__(self, setup: Setup, url: str, pool: ThreadPoolExecutor, posted: Semaphore) -> None:
        self.setup = setup
        self._url = url
        self._pool = pool
        self._posted = posted
        self._sent = 0

    def send(self, address: str) -> "Future[httpx.Response]":
        self._sent += 1
        body = {"prompt": prompt(self._sent, 5), "max_tokens": 2}
        answer = self._pool.submit(
            httpx.post,
            f"{self._url}/v1/completions",
            json=body,
            headers={"X-Forwarded-For": address},
            timeout=CLIENT_SECONDS,
        )
        assert self._posted.acquire(timeout=CLIENT_SECONDS)
        return answer

    def flood(self) -> list["Future[httpx.Response]"]:
        """The first runs, and the engine is held in its step; the others wait."""
        first = self.send("10.0.0.1")
        assert self.setup.runner.begun.wait(CLIENT_SECONDS)
        return [first, *(self.send("10.0.0.1") for _ in range(FLOOD - 1))]


@contextmanager
def clients(monkeypatch: pytest.MonkeyPatch, **limits: int) -> Iterator[Clients]:
    posted = Semaphore(0)
    post = Inbox.post

    def noted_post(inbox: Inbox, function: Callable[[], object]) -> "Future[object]":
        result = post(inbox, function)
        posted.release()
        return result

    monkeypatch.setattr(Inbox, "post", noted_post)
    setup = Setup(max_running=1, **limits)
    settings = Settings(port=0, trusted_proxies=PROXY)
    with running(setup.engine, settings) as url, ThreadPoolExecutor(2 * FLOOD) as pool:
        try:
            yield Clients(setup, url, pool, posted)
        finally:
            setup.runner.open()


def test_a_flood_does_not_hold_up_another_client(monkeypatch: pytest.MonkeyPatch) -> None:
    with clients(monkeypatch) as daemon:
        flood = daemon.flood()
        short = daemon.send("10.0.0.2")
        daemon.setup.runner.open()
        assert {answer.result().status_code for answer in [*flood, short]} == {200}
    started = [int(id) for id in daemon.setup.harness.runner.computed_tokens]
    assert started.index(FLOOD) == 2, "after the one that ran, and the one whose turn it was"


def test_a_flood_leaves_others_room_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    with clients(monkeypatch, max_waiting=4) as daemon:
        flood = daemon.flood()
        short = daemon.send("10.0.0.2")
        daemon.setup.runner.open()
        assert short.result().status_code == 200
        answers = [answer.result() for answer in flood]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert [answer.status_code for answer in answers].count(200) == 3
    assert len(refused) == FLOOD - 3
    for answer in refused:
        assert "2 sequences wait, 2 of them this client's, and 4 may" in answer.text
        assert int(answer.headers["retry-after"]) >= 1


def ask(url: str, address: str, **headers: str) -> None:
    transport = httpx.HTTPTransport(local_address=address)
    with httpx.Client(base_url=url, transport=transport, headers=headers) as http:
        assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 200


def forwarded(address: str) -> dict[str, str]:
    return {"X-Forwarded-For": address}


def test_a_client_is_its_address_whatever_it_says(base_url: str, engine: FakeEngine) -> None:
    ask(base_url, "127.0.0.1", **forwarded("10.0.0.9"))
    assert engine.submitted.get_nowait().client == "127.0.0.1"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere loopback is a single address")
def test_another_address_is_another_client(base_url: str, engine: FakeEngine) -> None:
    ask(base_url, "127.0.0.2")
    assert engine.submitted.get_nowait().client == "127.0.0.2"


def test_a_trusted_proxy_says_for_whom_it_asks() -> None:
    engine = FakeEngine()
    with running(engine, Settings(port=0, trusted_proxies="127.0.0.0/29, ::1")) as url:
        ask(url, "127.0.0.1", **forwarded("1.1.1.1, 10.0.0.9"))
        ask(url, "127.0.0.1")
    clients = [engine.submitted.get_nowait().client for _ in range(2)]
    assert clients == ["10.0.0.9", "127.0.0.1"]


ROUTES = sorted(BODIES.keys() - {"/api/chat", "/v1/messages"})


@pytest.mark.parametrize("route", ROUTES)
def test_nobody_chooses_a_priority(route: str, http: httpx.Client, engine: FakeEngine) -> None:
    answer = http.post(route, json=BODIES[route] | {"priority": -1})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "priority"
    assert "allow_priority" in error["message"]
    assert engine.submitted.empty()
    assert http.post(route, json=BODIES[route] | {"priority": 0}).status_code == 200


@pytest.mark.parametrize("route", ROUTES)
def test_where_the_settings_allow_it_a_priority_reaches_the_engine(route: str) -> None:
    engine = FakeEngine()
    with running(engine, Settings(port=0, allow_priority=True)) as url:
        answer = httpx.post(url + route, json=BODIES[route] | {"priority": -3})
    assert answer.status_code == 200
    assert engine.submitted.get_nowait().priority == -3
