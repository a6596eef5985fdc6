"""Who may come in, by which name, and with how much."""

import json
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest
from openai import AuthenticationError
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from server.metrics import HttpAnswers
from server.middleware import RequestLog, SameOrigin
from server.settings import Settings
from tests.contract.conftest import strict_client
from tests.contract.daemon import running
from tests.contract.fake_engine import FakeEngine

KEY = "sk-local-123"
BODY_BYTES = 1000
WAIT_SECONDS = 20


@pytest.fixture(scope="module")
def guarded_url() -> Iterator[str]:
    settings = Settings(port=0, api_key=KEY, max_body_bytes=BODY_BYTES)
    with running(FakeEngine(), settings) as base_url:
        yield base_url


@pytest.fixture
def guarded(guarded_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=guarded_url) as client:
        yield client


PROTECTED = [
    ("GET", "/v1/models"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions/render"),
    ("POST", "/v1/completions/render"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/admin/cache/clear"),
    ("GET", "/admin/cache/stats"),
    ("POST", "/admin/cache/probe"),
    ("GET", "/admin/requests"),
]
WRONG_KEYS = [
    None,
    "",
    "Bearer",
    f"Bearer{KEY}",
    f"Bearer {KEY}x",
    f"Bearer {KEY[:-1]}",
    KEY,
    f"Basic {KEY}",
]


@pytest.mark.parametrize(("method", "path"), PROTECTED)
@pytest.mark.parametrize("authorization", WRONG_KEYS)
def test_the_key_is_needed(
    guarded: httpx.Client, method: str, path: str, authorization: str | None
) -> None:
    headers = {} if authorization is None else {"Authorization": authorization}
    answer = guarded.request(method, path, headers=headers)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert answer.headers["www-authenticate"] == "Bearer"


def status_of(base_url: str, *lines: str) -> int:
    """The answer to what no well-mannered client would send."""
    address = urlsplit(base_url)
    with socket.create_connection((address.hostname, address.port), WAIT_SECONDS) as connection:
        connection.sendall("".join(f"{line}\r\n" for line in (*lines, "")).encode())
        with connection.makefile("rb") as received:
            return int(received.readline().split()[1])


def test_the_key_opens(guarded_url: str) -> None:
    with strict_client(guarded_url, KEY) as client:
        assert client.models.list().data[0].id == "test/bytes"
    with strict_client(guarded_url, "wrong") as client, pytest.raises(AuthenticationError):
        client.models.list()


@pytest.mark.parametrize("scheme", ["bearer ", "BEARER ", "Bearer   ", " \tbEARER  "])
def test_the_schemes_case_and_spaces_do_not_matter(guarded_url: str, scheme: str) -> None:
    lines = ("GET /v1/models HTTP/1.1", "Host: a", f"Authorization:{scheme}{KEY} \t")
    assert status_of(guarded_url, *lines) == 200


@pytest.mark.parametrize("path", ["/health", "/load", "/metrics", "/version"])
def test_what_watchers_and_routers_need_is_open(guarded: httpx.Client, path: str) -> None:
    assert guarded.get(path).status_code == 200


def test_a_body_that_says_it_is_too_large(guarded: httpx.Client) -> None:
    answer = guarded.post("/v1/completions", content=b"x" * (BODY_BYTES + 1), headers=AUTHORIZED)
    assert answer.status_code == 413
    assert str(BODY_BYTES) in answer.json()["error"]["message"]
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_a_body_that_is_refused_need_not_be_read(guarded: httpx.Client) -> None:
    """The answer gets through although the client is still sending."""
    answer = guarded.post("/v1/completions", content=b"x" * 2**24, headers=AUTHORIZED)
    assert answer.status_code == 413


def test_a_body_that_turns_out_to_be_too_large(guarded: httpx.Client) -> None:
    chunks = iter([b"x" * 600, b"x" * 600])
    answer = guarded.post("/v1/completions", content=chunks, headers=AUTHORIZED)
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "body_too_large"


def test_a_body_of_just_the_limit(guarded: httpx.Client) -> None:
    body = {"prompt": "a", "user": ""}
    body["user"] = "x" * (BODY_BYTES - len(json.dumps(body)))
    content = json.dumps(body)
    assert len(content) == BODY_BYTES
    answer = guarded.post("/v1/completions", content=content, headers=AUTHORIZED)
    assert answer.status_code == 200


AUTHORIZED = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://localhost:1", "http://["]
)
def test_other_sites_cannot_use_a_visitors_browser(http: httpx.Client, origin: str) -> None:
    answer = http.post("/admin/cache/clear", headers={"Origin": origin})
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "foreign_origin"


async def test_an_origin_without_a_name_is_not_that_of_a_nameless_host() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse("passed")(scope, receive, send)

    transport = httpx.ASGITransport(RequestLog(SameOrigin(app), HttpAnswers()))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        answer = await client.get("/", headers={"Origin": "null", "Host": ""})
    assert answer.status_code == 403


def test_own_pages_may_ask(http: httpx.Client, base_url: str) -> None:
    assert http.get("/v1/models", headers={"Origin": base_url}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", ""]
)
def test_foreign_names_for_this_machine_are_refused(http: httpx.Client, host: str) -> None:
    answer = http.get("/v1/models", headers={"Host": host})
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "foreign_host"


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "127.0.0.1", "[::1]:8000", "[::1]"]
)
def test_loopback_names_are_served(http: httpx.Client, host: str) -> None:
    assert http.get("/v1/models", headers={"Host": host}).status_code == 200


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


def test_with_a_key_any_name_is_served(guarded: httpx.Client) -> None:
    headers = AUTHORIZED | {"Host": "llm.example.org", "Origin": "https://app.example.org"}
    assert guarded.get("/v1/models", headers=headers).status_code == 200
