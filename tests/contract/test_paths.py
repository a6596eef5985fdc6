"""No route answers a path with a 5xx, whatever stands in the place of its parameters."""

import re
from collections.abc import Iterator
from itertools import chain

import httpx
import pytest

from server.app import DASHBOARD, SECTIONS
from server.settings import Settings
from tests.contract.daemon import running
from tests.contract.fake_engine import FakeEngine
from tests.contract.scripted import CLIENT_SECONDS

ROUTES = sorted(
    {
        route.path  # type: ignore[attr-defined]
        for router in chain(*SECTIONS.values(), *DASHBOARD.values())
        for route in router.routes
    }
)
NAMES = [
    *("", "/", "//", "%2F", "%2f..%2f", ".", "..", "../..", "%2e%2e", "%00", "%FF", "%", "%zz"),
    *("%20", "%C3%A9", ":", "a:b", "{id}", "-1", "9" * 400, "a" * 4000, "a/" * 500, ";a", "a%0Ab"),
]
"""What may stand in the place of a parameter."""


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with (
        running(FakeEngine(), Settings(port=0)) as url,
        httpx.Client(base_url=url, timeout=CLIENT_SECONDS) as client,
    ):
        yield client


def status(client: httpx.Client, method: str, path: str, body: bytes | None = None) -> int:
    """The status of a path that is sent as it is. Streams that never end are not read."""
    url = client.base_url.copy_with(raw_path=path.encode())
    kind = {} if body is None else {"content-type": "application/json"}
    with client.stream(method, url, content=body, headers=kind) as answer:
        return answer.status_code


def variants(route: str) -> Iterator[str]:
    """Paths like those of the route."""
    names = NAMES if "{" in route else ["a"]
    paths = [re.sub(r"\{[^}]*\}", lambda _, name=name: name, route) for name in names]  # type: ignore[misc]
    yield from paths
    path = paths[-1]
    yield from (path + end for end in ("/", "//", "/.", "/..", "%2F", "?", "?a=%00&&=", "/a" * 9))
    yield from ("/" + path, path.replace("/", "//"), path.replace("/", "/./"), path.upper())
    yield "/" + path[1:].replace("/", "%2F")


@pytest.mark.parametrize("route", ROUTES)
def test_no_path_of_a_route_is_a_failure(client: httpx.Client, route: str) -> None:
    for path in variants(route):
        for method, body in (("GET", None), ("HEAD", None), ("POST", b"{}"), ("DELETE", None)):
            found = status(client, method, path, body)
            assert found < 500, (method, path, found)


@pytest.mark.parametrize("query", ["", "?limit=5", "?client_version=1"])
def test_without_a_name_the_models_are_listed(client: httpx.Client, query: str) -> None:
    listed = client.get(f"/v1/models/{query}")
    assert listed.status_code == 200
    assert listed.json() == client.get(f"/v1/models{query}").json()
    assert client.head(f"/v1/models/{query}").status_code == 200
