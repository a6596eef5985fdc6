"""How much each key may ask."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from server.settings import Settings
from tests.contract.access.helpers import CHAT, client_of, key_file, line_with, refusals
from tests.contract.daemon import running
from tests.contract.fake_engine import FakeEngine, Gate, Script
from tests.contract.scripted import CLIENT_SECONDS


@contextmanager
def daemon(engine: FakeEngine, folder: Path, **limits: int) -> Iterator[str]:
    """Alice has the limits, Bob has none."""
    keys = key_file(folder, alice={**limits}, bob={})
    with running(engine, Settings(port=0, api_keys_file=keys)) as url:
        yield url


def check_refused(answer: httpx.Response, limit: str) -> None:
    assert answer.status_code == 429
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert limit in error["message"]


def test_a_stream_has_its_place_until_its_end(tmp_path: Path) -> None:
    gate = Gate()
    engine = FakeEngine(Script(gate=gate, gate_after_tokens=3))
    with daemon(engine, tmp_path, concurrency=1) as url, client_of(url, "alice") as alice:
        streamed = CHAT | {"stream": True}
        with alice.stream("POST", "/v1/chat/completions", json=streamed) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            engine.at_gate.get(timeout=CLIENT_SECONDS)
            check_refused(alice.post("/v1/chat/completions", json=CHAT), "1 requests at a time")
            assert alice.get("/v1/models").status_code == 200
            gate.open()
            assert list(filter(None, lines))[-1] == "data: [DONE]"
        assert alice.post("/v1/chat/completions", json=CHAT).status_code == 200
        assert refusals(url) == {("concurrency", "alice"): 1}


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_are_those_of_the_usage(tmp_path: Path, stream: bool) -> None:
    body = {"prompt": ["abcd", "efg"], "n": 2, "max_tokens": 3, "stream": stream}
    used = 4 + 3 + 2 * 2 * 3
    for limit, status in ((used + 1, 200), (used, 429)):
        with (
            daemon(FakeEngine(), tmp_path, tokens_per_minute=limit) as url,
            client_of(url, "alice") as alice,
        ):
            assert alice.post("/v1/completions", json=body).status_code == 200
            answer = alice.post("/v1/completions", json=body)
            assert answer.status_code == status
    check_refused(answer, f"{used} tokens a minute")


def test_who_leaves_pays_for_what_was_computed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rootstock")
    gate = Gate()
    engine = FakeEngine(Script(gate=gate, gate_after_tokens=3))
    body = {"prompt": "abcd", "stream": True}
    with daemon(engine, tmp_path, tokens_per_minute=7) as url, client_of(url, "alice") as alice:
        with alice.stream("POST", "/v1/completions", json=body):
            engine.at_gate.get(timeout=CLIENT_SECONDS)
        assert " key=alice " in line_with(caplog, "client-left")
        gate.open()
        check_refused(alice.post("/v1/completions", json=body), "7 tokens a minute")


def begun(alice: httpx.Client, engine: FakeEngine) -> str:
    """The id of a response that is made in the background, and has its first tokens."""
    answer = alice.post("/v1/responses", json={"input": "Hi", "background": True})
    assert answer.json()["status"] == "queued"
    engine.at_gate.get(timeout=CLIENT_SECONDS)
    return str(answer.json()["id"])


def test_a_background_response_has_its_place_until_its_end(tmp_path: Path) -> None:
    gate = Gate()
    engine = FakeEngine(Script(gate=gate))
    with daemon(engine, tmp_path, concurrency=1) as url, client_of(url, "alice") as alice:
        id = begun(alice, engine)
        check_refused(alice.post("/v1/completions", json={"prompt": "a"}), "1 requests at a time")
        assert alice.get(f"/v1/responses/{id}").json()["status"] == "in_progress"
        assert alice.post(f"/v1/responses/{id}/cancel").json()["status"] == "cancelled"
        gate.open()
        assert alice.post("/v1/completions", json={"prompt": "a"}).status_code == 200


def test_a_background_response_pays_for_what_was_computed(tmp_path: Path) -> None:
    gate = Gate()
    engine = FakeEngine(Script(gate=gate, gate_after_tokens=3))
    with daemon(engine, tmp_path, tokens_per_minute=1) as url, client_of(url, "alice") as alice:
        alice.post(f"/v1/responses/{begun(alice, engine)}/cancel")
        check_refused(alice.post("/v1/completions", json={"prompt": "a"}), "1 tokens a minute")
        gate.open()


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions/render", "/v1/completions/render", "/tokenize"]
)
def test_what_routers_request_for_each_chat_counts_for_nothing(tmp_path: Path, path: str) -> None:
    body = CHAT if "chat" in path else {"prompt": "a"}
    with (
        daemon(FakeEngine(), tmp_path, requests_per_minute=1) as url,
        client_of(url, "alice") as alice,
    ):
        for _ in range(3):
            assert alice.post(path, json=body).status_code == 200
        assert alice.post("/v1/chat/completions", json=CHAT).status_code == 200
        check_refused(alice.post("/v1/chat/completions", json=CHAT), "1 requests a minute")
