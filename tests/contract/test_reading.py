"""Every GET and HEAD of every route. None changes anything, whatever it names, and none fails: any
web page can make a browser send them.
"""

import logging
import re
from collections.abc import Iterator
from itertools import chain, product
from logging import LogRecord
from logging.handlers import QueueHandler
from pathlib import Path
from queue import Queue
from urllib.parse import quote

import httpx
import pytest
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from huggingface_hub import constants

from engine.mlx_backend.loading.checkpoint import DEFAULT_CHECKPOINT
from server.app import DASHBOARD, SECTIONS
from server.models.policy import Unknown
from server.models.registry import ModelRegistry
from tests.contract.daemon import serving
from tests.contract.several import Engines, needs, settings_of
from tests.contract.test_several_models import repository
from tests.contract.wire import connected

PARAMETERS = {
    "model": ("", "uno", "two", "org/small", "nobody's"),  # two is not loaded, org/small cached
    "id": ("", "0", "1", "uno", "two", "org/small", "resp_0", "\0", "%"),
    "path": ("", "agents", "index.html", "../two", "\0"),
    "ids": ("", "1"),
    "stream": ("", "true"),
    "limit": ("", "1"),
    "order": ("", "asc"),
    "after": ("", "msg_0"),
    "before_id": ("", "msgbatch_0"),
    "after_id": ("", "msgbatch_0"),
    "purpose": ("", "batch"),
    "client_version": ("", "1"),
}
"""The values of each parameter of a path or a query; empty in a query: left out."""

SECONDS = 20.0


def names_of(dependant: Dependant) -> set[str]:
    """The query parameters of a route and of all that it depends on."""
    own = {field.name for field in dependant.query_params}
    return own.union(*map(names_of, dependant.dependencies))


def readings() -> Iterator[tuple[str, str]]:
    """The method and the target of each reading of each route, with all combinations of values."""
    routers = chain.from_iterable((SECTIONS | DASHBOARD).values())
    for route in (route for router in routers for route in router.routes):
        assert isinstance(route, APIRoute)
        methods = sorted({"GET", "HEAD"} & (route.methods or set()))
        if not methods:
            continue
        in_path = re.findall(r"{(\w+)", route.path)
        in_query = sorted(names_of(route.dependant))
        values = product(*(PARAMETERS[name] for name in (*in_path, *in_query)))
        for method, given in product(methods, values):
            path = route.path
            for name, value in zip(in_path, given, strict=False):
                path = re.sub(rf"{{{name}[^}}]*}}", quote(value), path)
            query = dict(zip(in_query, given[len(in_path) :], strict=True))
            text = httpx.QueryParams({name: value for name, value in query.items() if value})
            yield method, f"{path}?{text}" if text else path
    yield from (("GET", "/openapi.json"), ("HEAD", "/openapi.json"))


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelRegistry:
    """Three models, the first in memory, and one in the cache, which is served on demand."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository(tmp_path, "org/small", DEFAULT_CHECKPOINT)
    settings = settings_of(
        on_demand=True,
        dashboard_text=True,
        body_timeout_seconds=0.2,
        batches=tmp_path / "batches",
    )
    return ModelRegistry(settings, Engines(), needs)


@pytest.fixture
def url(models: ModelRegistry) -> Iterator[str]:
    with serving(models, models.settings) as url:
        yield url


@pytest.fixture
def faults() -> Iterator["Queue[LogRecord]"]:
    """What the daemon logs with a traceback."""
    records = Queue[LogRecord]()
    handler = QueueHandler(records)
    handler.addFilter(lambda record: record.exc_info is not None)
    logging.getLogger().addHandler(handler)
    yield records
    logging.getLogger().removeHandler(handler)


def test_reading_changes_nothing_and_never_fails(models: ModelRegistry, url: str) -> None:
    before = {name: model.state for name, model in models.known.items()}
    failed, n_answers = [], 0
    with httpx.Client(base_url=url, timeout=SECONDS) as client:
        for method, target in readings():
            with client.stream(method, target) as answer:  # whose body may have no end
                n_answers += 1
                if answer.status_code >= 500:
                    failed.append((answer.status_code, method, target))
    assert failed == []
    assert n_answers > 300
    after = {name: model.state for name, model in models.known.items()}
    assert after == before | {"org/small": Unknown()}


def test_a_body_that_does_not_come_is_no_fault(url: str, faults: "Queue[LogRecord]") -> None:
    """A stream has not begun by then, and is a 408 like any other answer that needs the body."""
    statuses = dict[str, set[int]]()
    for method, target in readings():
        if "?" in target or "%" in target:
            continue
        with connected(url) as connection:
            head = f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n"
            connection.sendall(head.encode())
            first = connection.makefile("rb").readline()  # others wait for the body to pass it over
            statuses.setdefault(target, set()).add(int(first.split()[1]))
    assert faults.empty()
    assert statuses["/admin/activity/stream"] == statuses["/admin/cache/tree/stream"] == {408}
    assert statuses["/v1/models"] == statuses["/health"] == {200}
