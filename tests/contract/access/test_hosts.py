"""By which names a daemon without keys may be called."""

from collections.abc import Iterator

import httpx
import pytest

from server.access.admission import Hosts
from server.settings import Settings
from tests.contract.access.helpers import refusals, status_of
from tests.contract.daemon import running
from tests.contract.fake_engine import FakeEngine

FOREIGN = ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example"]


def check_refused(url: str, host: str) -> None:
    answer = httpx.get(f"{url}/v1/models", headers={"Host": host})
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "foreign_host"


def check_served(url: str, host: str) -> None:
    assert httpx.get(f"{url}/v1/models", headers={"Host": host}).status_code == 200


def test_this_machines_own_names_alone_are_served(base_url: str) -> None:
    for host in ("localhost", "[::1]:8000", "host.docker.internal:8000", "Studio.local"):
        check_served(base_url, host)
    for host in (*FOREIGN, "192.168.1.2", ""):
        check_refused(base_url, host)


@pytest.fixture(scope="module")
def public_url(no_settings_from_outside: None) -> Iterator[str]:
    """A daemon that listens to other machines and asks for no key."""
    settings = Settings(
        host="0.0.0.0",
        port=0,
        allow_public_without_key=True,
        allowed_host=("llm.lan", "*.example.org"),
    )
    with running(FakeEngine(), settings) as url:
        yield url.replace("0.0.0.0", "127.0.0.1")


def test_addresses_and_allowed_names_alone_are_served_to_other_machines(public_url: str) -> None:
    for host in ("192.168.1.2:8000", "LLM.lan", "a.example.org"):
        check_served(public_url, host)
    for host in (*FOREIGN, "example.org", "x.llm.lan", "evilexample.org"):
        check_refused(public_url, host)


def test_an_address_may_be_written_at_any_length() -> None:
    hosts = Hosts("127.0.0.1", ("[2001:DB8:0:0::1]",))
    assert hosts.has("[2001:db8::1]:8000")
    assert not hosts.has("[2001:db8::2]:8000")


def test_who_was_refused_is_counted() -> None:
    with running(FakeEngine(), Settings(port=0)) as url:
        check_refused(url, "evil.example")
        assert refusals(url) == {("foreign_host", ""): 1}


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (["GET /v1/models HTTP/1.0"], 200),
        (["GET /v1/models HTTP/1.0", "Host: localhost"], 200),
        (["GET /v1/models HTTP/1.0", "Host: evil.example"], 403),
        (["GET /v1/models HTTP/1.0", "Host:"], 403),
        (["GET /v1/models HTTP/1.0", "Origin: null"], 403),
        (["GET /v1/models HTTP/1.1", "Host:"], 403),
        (["GET /v1/models HTTP/1.1"], 400),
    ],
)
def test_only_old_clients_need_no_host(base_url: str, lines: list[str], status: int) -> None:
    assert status_of(base_url, *lines) == status


@pytest.mark.parametrize(
    "lines",
    [
        ["Host: localhost", "Host: localhost"],
        ["Host: localhost", "host: evil.example"],
        ["Host: localhost", "Origin: http://localhost", "Origin: http://localhost"],
        ["Host: localhost", "Origin: http://localhost", "ORIGIN: https://evil.example"],
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/health"])
def test_of_two_hosts_or_origins_none_counts(base_url: str, path: str, lines: list[str]) -> None:
    assert status_of(base_url, f"GET {path} HTTP/1.1", *lines[:1], "Connection: close") == 200
    assert status_of(base_url, f"GET {path} HTTP/1.1", *lines) == 400


def test_nor_do_they_where_there_are_keys() -> None:
    lines = ["GET /v1/models HTTP/1.1", "x-api-key: secret", "Host: a"]
    with running(FakeEngine(), Settings(port=0, api_key="secret")) as url:
        assert status_of(url, *lines) == 200
        assert status_of(url, *lines, "Host: b") == 400


def test_two_origins_are_refused_in_the_words_of_the_route(base_url: str) -> None:
    twice = [("Origin", "http://localhost")] * 2
    answer = httpx.post(f"{base_url}/v1/chat/completions", headers=twice, json={})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, None)
    answer = httpx.post(f"{base_url}/v1/messages", headers=twice, json={})
    assert (answer.status_code, answer.json()["type"]) == (400, "error")
