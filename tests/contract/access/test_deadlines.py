"""How long a request may take, from its arrival to the end of its answer."""

import json
from collections.abc import Iterator

import httpx
import pytest
from openai import InternalServerError, OpenAI

from server.settings import Settings
from tests.contract.access.helpers import CHAT
from tests.contract.conftest import CLIENT_SECONDS
from tests.contract.daemon import running
from tests.contract.fake_engine import FakeEngine, Gate, Script

BEFORE_THE_FIRST_TOKEN_SECONDS = 0.2
IN_MID_STREAM_SECONDS = 3.0  # in which the first tokens come, on a slow machine too


@pytest.fixture
def gate() -> Iterator[Gate]:
    """Closed until the test is over."""
    gate = Gate()
    yield gate
    gate.open()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_an_answer_that_has_not_begun_is_a_504(gate: Gate, path: str, stream: bool) -> None:
    engine = FakeEngine(Script(gate=gate))
    settings = Settings(port=0, request_timeout_seconds=BEFORE_THE_FIRST_TOKEN_SECONDS)
    body = CHAT if "chat" in path else {"prompt": "Hi"}
    with running(engine, settings) as url:
        answer = httpx.post(url + path, json=body | {"stream": stream}, timeout=CLIENT_SECONDS)
        request_id = engine.aborted.get(timeout=CLIENT_SECONDS)
    assert answer.status_code == 504
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "request_timeout")
    assert "request_timeout_seconds" in error["message"]
    assert request_id.startswith(answer.headers["x-request-id"])


def test_an_answer_that_has_begun_ends_with_the_error(gate: Gate) -> None:
    engine = FakeEngine(Script(gate=gate, gate_after_tokens=3))
    settings = Settings(port=0, request_timeout_seconds=IN_MID_STREAM_SECONDS)
    with running(engine, settings) as url:
        body = CHAT | {"stream": True}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=CLIENT_SECONDS)
        assert engine.aborted.get(timeout=CLIENT_SECONDS) == answer.headers["x-request-id"]
    assert answer.status_code == 200
    *_, last = filter(None, answer.text.split("\n\n"))
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "request_timeout"


def test_clients_do_not_send_it_again(gate: Gate) -> None:
    engine = FakeEngine(Script(gate=gate))
    settings = Settings(port=0, request_timeout_seconds=BEFORE_THE_FIRST_TOKEN_SECONDS)
    with (
        running(engine, settings) as url,
        OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=2) as client,
        pytest.raises(InternalServerError) as caught,
    ):
        client.completions.create(model="", prompt="Hi")
    assert caught.value.status_code == 504
    assert engine.submitted.qsize() == 1


def test_by_default_a_request_may_take_as_long_as_it_takes() -> None:
    assert Settings().request_timeout_seconds is None
