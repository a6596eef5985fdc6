"""What Anthropic's clients are told of keys, limits and time, in their own error's shape."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anthropic
import httpx
import pytest
from anthropic import Anthropic

from server.settings import Settings
from tests.contract.access.helpers import MESSAGES, client_of, key_file, secret_of
from tests.contract.conftest import CLIENT_SECONDS
from tests.contract.daemon import running
from tests.contract.fake_engine import FakeEngine, Gate, Script

BODY = {"model": "test/bytes", "max_tokens": 9, "messages": MESSAGES}
WAIT_SECONDS = 3.0  # in which the first tokens come, on a slow machine too


@contextmanager
def daemon(folder: Path, engine: FakeEngine, seconds: float | None = None) -> Iterator[str]:
    """Alice may ask once a minute."""
    keys = key_file(folder, alice={"requests_per_minute": 1}, bob={})
    settings = Settings(port=0, api_keys_file=keys, request_timeout_seconds=seconds)
    with running(engine, settings) as url:
        yield url


def ask(client: Anthropic) -> anthropic.types.Message:
    return client.messages.create(
        model="test/bytes", max_tokens=9, messages=[{"role": "user", "content": "Hi"}]
    )


def test_its_sdk_sends_the_key_either_way_and_knows_the_errors(tmp_path: Path) -> None:
    alice, bob = secret_of("alice"), secret_of("bob")
    with daemon(tmp_path, FakeEngine()) as url:
        with Anthropic(base_url=url, max_retries=0, api_key=bob) as client:
            assert ask(client).role == "assistant"
        with Anthropic(base_url=url, max_retries=0, auth_token=bob) as client:
            assert ask(client).role == "assistant"
        with (
            Anthropic(base_url=url, max_retries=0, api_key="wrong") as client,
            pytest.raises(anthropic.AuthenticationError),
        ):
            ask(client)
        with Anthropic(base_url=url, max_retries=0, api_key=alice) as client:
            ask(client)
            with pytest.raises(anthropic.RateLimitError) as caught:
                ask(client)
    assert int(caught.value.response.headers["retry-after"]) >= 1


def test_errors_of_the_door_have_its_shape(tmp_path: Path) -> None:
    with daemon(tmp_path, FakeEngine()) as url, client_of(url, "alice") as alice:
        wrong = httpx.post(f"{url}/v1/messages", json=BODY)
        alice.post("/v1/messages", json=BODY)
        spent = alice.post("/v1/messages", json=BODY)
    for answer, status, kind in (
        (wrong, 401, "authentication_error"),
        (spent, 429, "rate_limit_error"),
    ):
        assert answer.status_code == status
        assert answer.json()["type"] == "error"
        assert answer.json()["error"]["type"] == kind
    assert wrong.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    ("tokens", "seconds", "status", "beginning"),
    [(0, 0.2, 504, "{"), (3, WAIT_SECONDS, 200, "error\n")],
)
def test_a_request_whose_time_is_over(
    tmp_path: Path, tokens: int, seconds: float, status: int, beginning: str
) -> None:
    gate = Gate()
    engine = FakeEngine(Script(gate=gate, gate_after_tokens=tokens))
    with daemon(tmp_path, engine, seconds) as url, client_of(url, "bob") as bob:
        answer = bob.post("/v1/messages", json=BODY | {"stream": True}, timeout=CLIENT_SECONDS)
        for _ in range(engine.submitted.qsize()):
            engine.aborted.get(timeout=CLIENT_SECONDS)
        gate.open()
    assert answer.status_code == status
    last = answer.text.rpartition("event: ")[2]
    assert last.startswith(beginning)
    assert '"type":"timeout_error"' in last
