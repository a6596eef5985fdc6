"""How long a request may take, from its arrival to the end of its answer."""

import json
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

import httpx
import pytest
from openai import InternalServerError, OpenAI

from server.fairness import LARGE_BYTES
from server.settings import Settings
from tests.contract.access.helpers import CHAT, status_of
from tests.contract.daemon import running
from tests.contract.fake_engine import (
    FakeEngine,
    Gate,
    HeldTokenizer,
    Script,
    TryingEngine,
)
from tests.contract.scripted import CLIENT_SECONDS
from tests.polling import until

BEFORE_THE_FIRST_TOKEN_SECONDS = 0.2
IN_MID_STREAM_SECONDS = 3.0  # in which the first tokens come, on a slow machine too


@pytest.fixture
def gate() -> Iterator[Gate]:
    """Closed until the test is over."""
    gate = Gate()
    yield gate
    gate.open()


@pytest.mark.parametrize("path", ["/tokenize", "/v1/completions", "/v1/completions/render"])
def test_nobody_waits_longer_for_a_large_request_of_another(path: str) -> None:
    tokenizer = HeldTokenizer()
    settings = Settings(port=0, request_timeout_seconds=BEFORE_THE_FIRST_TOKEN_SECONDS)
    body = json.dumps({"prompt": "x"}).encode().ljust(LARGE_BYTES + 1)
    with running(FakeEngine(tokenizer=tokenizer), settings) as url, ThreadPoolExecutor() as pool:
        asked = [
            pool.submit(httpx.post, url + path, content=body, timeout=CLIENT_SECONDS)
            for _ in range(2)
        ]
        try:
            done, _ = wait(asked, CLIENT_SECONDS / 2, FIRST_COMPLETED)
            assert [answer.result().status_code for answer in done] == [504] * len(done) != []
        finally:
            tokenizer.gate.open()


@pytest.mark.parametrize("path", ["/v1/chat/completions/render", "/v1/completions/render"])
def test_nor_for_what_it_would_be_told_without_an_answer(path: str) -> None:
    engine = TryingEngine()
    settings = Settings(port=0, request_timeout_seconds=BEFORE_THE_FIRST_TOKEN_SECONDS)
    with running(engine, settings) as url:
        try:
            answer = httpx.post(url + path, json=CHAT | {"prompt": "x"}, timeout=CLIENT_SECONDS)
        finally:
            engine.gate.open()
    assert answer.status_code == 504


def test_nor_is_a_body_waited_for() -> None:
    settings = Settings(port=0, request_timeout_seconds=BEFORE_THE_FIRST_TOKEN_SECONDS)
    with running(FakeEngine(), settings) as url:
        head = ("POST /tokenize HTTP/1.1", "Host: 127.0.0.1", "Content-Length: 9")
        assert status_of(url, *head) == 504


def test_a_background_response_has_failed_with_it(gate: Gate) -> None:
    engine = FakeEngine(Script(gate=gate, gate_after_tokens=3))
    settings = Settings(port=0, request_timeout_seconds=IN_MID_STREAM_SECONDS)
    with (
        running(engine, settings) as url,
        httpx.Client(base_url=url, timeout=CLIENT_SECONDS) as http,
    ):
        made = http.post("/v1/responses", json={"input": "Hi", "background": True}).json()
        engine.aborted.get(timeout=CLIENT_SECONDS)
        stored = f"/v1/responses/{made['id']}"
        response = until(
            lambda: http.get(stored).json(), lambda found: found["status"] != "in_progress"
        )
    assert response["status"] == "failed"
    assert "request_timeout_seconds" in response["error"]["message"]


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
    assert engine.submitted.qsize() <= 1


def test_by_default_a_request_may_take_as_long_as_it_takes() -> None:
    assert Settings().request_timeout_seconds is None
