"""Bodies whose model is not loaded wait as bytes: they hold no worker, count in the budget of
bodies to the byte, and go when their client leaves.
"""

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from server.models.registry import ModelRegistry
from tests.contract.daemon import serving
from tests.contract.fake_engine import Gate
from tests.contract.several import HI, Engines, needs, settings_of
from tests.contract.wire import connected, request_head
from tests.polling import WAIT_SECONDS, until

CHAT = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
LARGE_BYTES = 190_000
LIMITS: dict[str, Any] = {"max_body_bytes": 200_000, "max_total_body_bytes": 1_000_000}


@dataclass
class LoadingDaemon:
    """A daemon of which the model `one` is loaded, and `two` is when `gate` is opened."""

    url: str
    engines: Engines
    http: httpx.Client
    gate: Gate = field(default_factory=Gate)

    @property
    def n_waiting(self) -> int:
        """How many requests wait for `two`."""
        (two,) = (
            model
            for model in self.http.get("/admin/models").json()["models"]
            if model["id"] == "two"
        )
        n_waiting: int = two["waiting"]
        return n_waiting


@contextmanager
def loading(**settings: Any) -> Iterator[LoadingDaemon]:
    made, engines = settings_of(keepalive_seconds=0.01, **settings), Engines()
    with (
        serving(ModelRegistry(made, engines, needs), made) as url,
        httpx.Client(base_url=url, timeout=WAIT_SECONDS) as http,
    ):
        daemon = LoadingDaemon(url, engines, http)
        engines.gate = daemon.gate
        try:
            yield daemon
        finally:
            daemon.gate.open()


def padded(body: Mapping[str, object], n_bytes: int = LARGE_BYTES) -> bytes:
    """The body as JSON of n_bytes, most of them white space."""
    return json.dumps(body).encode().ljust(n_bytes)


def chat(model: str, n_bytes: int = LARGE_BYTES, **fields: object) -> bytes:
    return padded({"model": model, "messages": [HI], **fields}, n_bytes)


def asked(pool: ThreadPoolExecutor, http: httpx.Client, body: bytes) -> Future[httpx.Response]:
    return pool.submit(http.post, CHAT, content=body, headers=JSON)


def test_a_large_body_whose_model_loads_holds_no_worker() -> None:
    """Even of the same client."""
    with loading() as daemon, ThreadPoolExecutor() as pool:
        waiting = asked(pool, daemon.http, chat("two"))
        until(lambda: daemon.n_waiting)
        other = daemon.http.post(CHAT, content=chat("one"), headers=JSON)
        assert other.status_code == 200
        assert not waiting.done()
        daemon.gate.open()
        assert waiting.result(WAIT_SECONDS).status_code == 200


def test_many_large_bodies_wait_within_the_budget_that_they_fill() -> None:
    """It counts their bytes, and no more."""
    with loading(**LIMITS) as daemon, ThreadPoolExecutor() as pool:
        waiting = [asked(pool, daemon.http, chat("two")) for _ in range(5)]
        until(lambda: daemon.n_waiting, lambda n_waiting: n_waiting == len(waiting))
        daemon.gate.open()
        assert [answer.result(WAIT_SECONDS).status_code for answer in waiting] == [200] * 5


def test_a_body_counts_as_long_as_its_stream_waits_for_the_model() -> None:
    """Keep-alives are no answer. With a second one the two are too large, and the larger goes."""
    limits = LIMITS | {"max_total_body_bytes": 300_000}
    with (
        loading(**limits) as daemon,
        ThreadPoolExecutor() as pool,
        daemon.http.stream("POST", CHAT, content=chat("two", stream=True), headers=JSON) as first,
    ):
        lines = first.iter_lines()
        assert next(lines).startswith(":")
        second = asked(pool, daemon.http, chat("two", LARGE_BYTES - 10_000))
        until(lambda: daemon.n_waiting, lambda n_waiting: n_waiting == 1 + second.done())
        daemon.gate.open()
        *_, last = (line for line in lines if line.startswith("data: "))
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "overloaded"
        assert second.result(WAIT_SECONDS).status_code == 200


def test_a_body_of_many_parts_takes_no_memory_from_another_client() -> None:
    """It is small itself, whatever it is parsed into."""
    limits = LIMITS | {"max_total_body_bytes": 200_000}
    parts: dict[str, object] = {"x": [[]] * 4000}
    with loading(**limits) as daemon, connected(daemon.url) as half:
        body = chat("one", 150_000)
        half.sendall(request_head(body[:-1], length=len(body)))
        assert daemon.http.post(CHAT, content=chat("one", 0, **parts)).status_code == 200
        half.sendall(body[-1:])
        assert half.recv(12) == b"HTTP/1.1 200"


LOADS_NOTHING = {"/api/show", "/api/pull", "/api/delete"}
"""Routes whose body names a model that they do not need in memory."""


REFUSED_AT_ONCE = {("/v1/decisions", "stream")}
"""Fields that a route refuses before a model is loaded for it."""


def routes_that_load(http: httpx.Client) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Each with the least body that makes it wait for the model `two`."""
    document = http.get("/openapi.json").json()
    yield "/admin/models/load?model=two", {}
    for path, methods in document["paths"].items():
        for method in methods.keys() & {"post"}:
            content = methods[method].get("requestBody", {}).get("content", {})
            if (media := content.get("application/json")) is None:
                continue
            name = media["schema"]["$ref"].rpartition("/")[2]
            has_model = "model" in document["components"]["schemas"][name]["properties"]
            if has_model and path not in LOADS_NOTHING:
                yield path, media["example"] | {"model": "two"}


def waits(daemon: LoadingDaemon, path: str, n_requests: int) -> None:
    """Return when n_requests wait for `two`."""
    until(lambda: (path, daemon.n_waiting), lambda found: found == (path, n_requests))


def test_a_client_that_leaves_while_its_model_loads_waits_on_no_route() -> None:
    with loading() as daemon:
        routes = list(routes_that_load(daemon.http))
        assert len(routes) > 20
        for path, body in routes:
            for more in ({}, {"stream": True}, {"background": True}):
                if any((path, field) in REFUSED_AT_ONCE for field in more):
                    assert daemon.http.post(path, json={**body, **more}).status_code == 400
                    continue
                with connected(daemon.url) as connection:
                    content = json.dumps({**body, **more}).encode()
                    connection.sendall(request_head(content, path=path))
                    waits(daemon, path, 1)
                waits(daemon, path, 0)
