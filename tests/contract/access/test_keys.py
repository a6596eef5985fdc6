"""Whose key opens what."""

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from server.settings import Settings
from tests.contract.access.helpers import (
    CHAT,
    bearer,
    client_of,
    key_file,
    refusals,
    secret_of,
    status_of,
)
from tests.contract.daemon import running
from tests.contract.fake_engine import FakeEngine

KEY = "sk-local-123"
USERS_PATHS = [
    ("GET", "/v1/models"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions/render"),
    ("POST", "/v1/completions/render"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/tokenizer_info"),
    ("POST", "/v1/nothing"),
    ("GET", "/nothing"),
]
ADMINS_PATHS = [
    ("POST", "/admin/cache/clear"),
    ("GET", "/admin/cache/stats"),
    ("HEAD", "/admin/cache/stats"),
    ("POST", "/admin/cache/probe"),
    ("GET", "/admin/daemon"),
    ("GET", "/admin/requests"),
    ("GET", "/admin"),
    ("GET", "/admin/cache/tree"),
    ("GET", "/admin/cache/tree/stream"),
    ("GET", "/admin/cache/nodes/1"),
    ("GET", "/admin/cache/nodes?ids=1"),
    ("GET", "/admin/requests/log"),
    ("GET", "/admin/series"),
    ("GET", "/admin/activity/stream"),
]
WRONG_KEYS: list[dict[str, str]] = [
    {"Authorization": ""},
    {"Authorization": "Bearer"},
    {"Authorization": f"Bearer{KEY}"},
    {"Authorization": f"Bearer {KEY}x"},
    {"Authorization": f"Bearer {KEY[:-1]}"},
    {"Authorization": KEY},
    {"Authorization": f"Basic {KEY}"},
    {"x-api-key": ""},
    {"x-api-key": f"Bearer {KEY}"},
    {"x-api-key": f"{KEY}x", "Authorization": "Bearer x"},
]


@pytest.fixture(scope="module")
def guarded_url(
    tmp_path_factory: pytest.TempPathFactory, no_settings_from_outside: None
) -> Iterator[str]:
    """A daemon with a key of the settings, and a file with a user's and an admin's."""
    keys = key_file(tmp_path_factory.mktemp("keys"), alice={}, root={"role": "admin"})
    with running(FakeEngine(), Settings(port=0, api_key=KEY, api_keys_file=keys)) as base_url:
        yield base_url


@pytest.fixture
def guarded(guarded_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=guarded_url) as client:
        yield client


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        *((method, path, {}) for method, path in (*USERS_PATHS, *ADMINS_PATHS)),
        *(("GET", "/v1/models", headers) for headers in WRONG_KEYS),
    ],
)
def test_a_key_is_needed(
    guarded: httpx.Client, method: str, path: str, headers: dict[str, str]
) -> None:
    answer = guarded.request(method, path, headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.headers["x-request-id"]
    if method != "HEAD":
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == "invalid_api_key"


@pytest.mark.parametrize(
    "path",
    [
        "/health",
        "/load",
        "/metrics",
        "/version",
        "/openapi.json",
        "/",
        "/docs",
        "/dashboard/docs/docs.css",
    ],
)
def test_what_watchers_and_routers_need_is_open(guarded: httpx.Client, path: str) -> None:
    assert guarded.get(path).status_code == 200


@pytest.mark.parametrize("secret", [KEY, secret_of("alice"), secret_of("root")])
@pytest.mark.parametrize(
    "send",
    [
        bearer,
        lambda secret: {"x-api-key": secret},
        lambda secret: {"x-api-key": secret, **bearer("no-key")},
        lambda secret: {"x-api-key": "no-key", **bearer(secret)},
    ],
    ids=["bearer", "x-api-key", "x-api-key beside another", "bearer beside another"],
)
def test_every_key_reaches_the_models_by_either_header(
    guarded: httpx.Client, secret: str, send: Callable[[str], dict[str, str]]
) -> None:
    assert guarded.get("/v1/models", headers=send(secret)).status_code == 200
    answer = guarded.post("/v1/chat/completions", json=CHAT, headers=send(secret))
    assert answer.status_code == 200


@pytest.mark.parametrize("secret", [KEY, secret_of("root")])
def test_admins_reach_admin(guarded: httpx.Client, secret: str) -> None:
    answer = guarded.get("/admin/cache/stats", headers=bearer(secret))
    assert answer.status_code == 200


@pytest.mark.parametrize(("method", "path"), ADMINS_PATHS)
def test_users_do_not(guarded: httpx.Client, method: str, path: str) -> None:
    answer = guarded.request(method, path, headers=bearer(secret_of("alice")))
    assert answer.status_code == 403
    if method != "HEAD":
        assert answer.json()["error"]["code"] == "admin_key_needed"


@pytest.mark.parametrize("scheme", ["bearer ", "BEARER ", "Bearer   ", " \tbEARER  "])
def test_the_schemes_case_and_spaces_do_not_matter(guarded_url: str, scheme: str) -> None:
    lines = ("GET /v1/models HTTP/1.1", "Host: a", f"Authorization:{scheme}{KEY} \t")
    assert status_of(guarded_url, *lines) == 200


def test_with_keys_any_host_and_page_may_ask(guarded: httpx.Client) -> None:
    headers = {"Host": "llm.example.org", "Origin": "https://app.example.org", **bearer(KEY)}
    assert guarded.get("/v1/models", headers=headers).status_code == 200


def test_refusals_are_counted_by_reason_and_key(tmp_path: Path) -> None:
    settings = Settings(port=0, api_keys_file=key_file(tmp_path, alice={}))
    with running(FakeEngine(), settings) as url, client_of(url, "alice") as alice:
        assert refusals(url) == {}
        for _ in range(2):
            httpx.get(f"{url}/v1/models", headers=bearer("guessed"))
        alice.get("/admin/requests")
        assert refusals(url) == {("invalid_key", ""): 2, ("role", "alice"): 1}


def test_each_key_takes_turns_for_itself(tmp_path: Path) -> None:
    engine = FakeEngine()
    keys = key_file(tmp_path, alice={}, bob={})
    with running(engine, Settings(port=0, api_keys_file=keys)) as url:
        for name in ("alice", "bob"):
            with client_of(url, name) as client:
                assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200
    assert [engine.submitted.get_nowait().client for _ in range(2)] == ["alice", "bob"]


@pytest.mark.parametrize("settings", [{"api_key": KEY}, {"api_keys_file": "alice"}])
def test_one_key_for_all_tells_nobody_apart(tmp_path: Path, settings: dict[str, str]) -> None:
    engine = FakeEngine()
    secret = KEY
    if "api_keys_file" in settings:
        secret, settings = secret_of("alice"), {"api_keys_file": str(key_file(tmp_path, alice={}))}
    with running(engine, Settings.model_validate({"port": 0, **settings})) as url:
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, headers=bearer(secret))
    assert answer.status_code == 200
    assert engine.submitted.get_nowait().client == "127.0.0.1"
