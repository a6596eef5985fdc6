"""How long a body may be."""

import json
from collections.abc import Iterator

import httpx
import pytest

from server.settings import Settings
from tests.contract.daemon import running
from tests.contract.fake_engine import FakeEngine

KEY = "sk-local-123"
BODY_BYTES = 1000


@pytest.fixture(scope="module")
def guarded_url() -> Iterator[str]:
    settings = Settings(port=0, api_key=KEY, max_body_bytes=BODY_BYTES)
    with running(FakeEngine(), settings) as base_url:
        yield base_url


@pytest.fixture
def guarded(guarded_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=guarded_url) as client:
        yield client


AUTHORIZED = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}


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
