"""What was asked for adds up: received = refused + finished, and every HTTP answer is counted.

The engine is the real one behind its thread; the model is hashes whose steps the test lets through.
"""

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from operator import eq
from typing import Any

import httpx
import pytest

from server.settings import Settings
from tests.contract.daemon import running
from tests.contract.metrics import metric_families, value
from tests.contract.wire import posted
from tests.polling import WAIT_SECONDS, until
from tests.unit.threaded_harness import Setup

MAX_WAITING = 4
COMPLETIONS = "/v1/completions"


class Watched:
    """A daemon, its engine, and what `/metrics` says of both."""

    def __init__(self, setup: Setup, url: str, pool: ThreadPoolExecutor) -> None:
        self.setup = setup
        self.url = url
        self._pool = pool

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=WAIT_SECONDS)

    def ask(self, **fields: Any) -> "Future[httpx.Response]":
        return self._pool.submit(
            httpx.post, self.url + COMPLETIONS, json=body(**fields), timeout=WAIT_SECONDS
        )

    def counts(self, name: str, label: str) -> dict[str, float]:
        """A counter's values above 0, by the label; of HTTP requests those for completions."""
        families = metric_families(self.get("/metrics").text)
        return {
            sample.labels[label]: sample.value
            for sample in families[name].samples
            if sample.value and sample.labels.get("route", COMPLETIONS) == COMPLETIONS
        }

    def value(self, name: str, **labels: str) -> float:
        return value(self.get("/metrics").text, name, **labels)

    def received(self) -> float:
        return self.value("rootstock_requests_received_total")

    def finished(self) -> dict[str, float]:
        return self.counts("rootstock_requests_finished", "reason")

    def refused(self) -> dict[str, float]:
        return self.counts("rootstock_requests_refused", "reason")

    def answered(self) -> dict[str, float]:
        return self.counts("rootstock_http_requests", "status")

    def step_begun(self) -> None:
        """A step is held up in the runner."""
        assert self.setup.runner.begun.wait(WAIT_SECONDS)


@pytest.fixture
def watched() -> Iterator[Watched]:
    setup = Setup(max_waiting=MAX_WAITING)
    settings = Settings(port=0, drain_timeout_seconds=0)
    with ThreadPoolExecutor() as pool, running(setup.engine, settings) as url:
        try:
            yield Watched(setup, url, pool)
        finally:
            setup.runner.open()


def body(**fields: Any) -> dict[str, Any]:
    return {"prompt": [1, 2, 3, 4, 5], "max_tokens": 4, **fields}


def test_a_long_step_holds_up_nobody_who_watches(watched: Watched) -> None:
    answer = watched.ask(n=2)
    watched.step_begun()
    assert watched.get("/health").json() == {"status": "ok"}
    assert watched.value("rootstock_requests_running") == 1
    assert watched.value("rootstock_requests_waiting") == 1
    assert watched.value("vllm:num_requests_waiting") == 1
    assert watched.get("/load").json() == {"server_load": 2, "running": 1, "waiting": 1}
    assert watched.get("/admin/cache/stats").json()["blocks_held"] > 0
    assert watched.value("rootstock_steps_total") == 0  # it is still the first step
    assert not answer.done()
    watched.setup.runner.open()
    assert answer.result(WAIT_SECONDS).status_code == 200
    assert watched.finished() == {"length": 2}


@pytest.mark.slow
def test_a_mixed_load_adds_up(watched: Watched) -> None:
    runner, harness = watched.setup.runner, watched.setup.harness
    first = watched.ask()
    watched.step_begun()

    for count, stream in enumerate([False, True, True], 1):  # gone before the loop looks up
        with posted(watched.url, COMPLETIONS, body(stream=stream)):
            until(watched.received, partial(eq, 1 + count))
        until(watched.answered, partial(eq, {"499": count}))
    assert watched.finished() == {"abort": 3}

    with posted(watched.url, COMPLETIONS, body(stream=True, max_tokens=150)) as connection:
        until(watched.received, partial(eq, 5))
        for _ in range(2):
            runner.gate.release()
        assert connection.recv(1).startswith(b"H")
    until(watched.finished, partial(eq, {"abort": 4}))

    crowd = [watched.ask(n=MAX_WAITING) for _ in range(3)]
    too_many = watched.ask(n=MAX_WAITING + 1)
    until(watched.received, partial(eq, 5 + 3 * MAX_WAITING + MAX_WAITING + 1))
    runner.open()
    assert first.result(WAIT_SECONDS).status_code == 200
    statuses = sorted(answer.result(WAIT_SECONDS).status_code for answer in crowd)
    assert statuses == [200, 429, 429]
    assert too_many.result(WAIT_SECONDS).status_code == 400

    def break_down() -> None:
        raise RuntimeError("out of memory")

    harness.fault = break_down
    assert watched.ask().result(WAIT_SECONDS).status_code == 500
    assert watched.get("/health").status_code == 200

    asyncio.run(watched.setup.engine.drain(0.0))
    assert watched.ask().result(WAIT_SECONDS).status_code == 503
    assert watched.get("/health").status_code == 503
    assert watched.get("/admin/cache/stats").status_code == 409, "it is not loaded any more"

    answered = {"499": 3, "200": 3, "429": 2, "400": 1, "500": 1, "503": 1}
    until(watched.answered, partial(eq, answered))
    refused, finished = watched.refused(), watched.finished()
    assert refused == {"queue_full": 2 * MAX_WAITING, "invalid": MAX_WAITING + 1}, (
        "the pool refused the last"
    )
    assert finished == {"length": 1 + MAX_WAITING, "abort": 4, "error": 1}
    assert watched.received() == sum(refused.values()) + sum(finished.values())
    assert watched.value("rootstock_requests_running") == 0
    assert watched.value("rootstock_requests_waiting") == 0
