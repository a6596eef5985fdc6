"""A client that leaves takes its work with it, wherever the work is."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from logging import LogRecord
from queue import Queue

import httpx
import pytest

from server.fairness import EACH_AT_ONCE
from server.settings import Settings
from tests.contract.conftest import ChatBody
from tests.contract.daemon import running
from tests.contract.fake_engine import FakeEngine, Gate, HeldTokenizer, Script
from tests.contract.wire import posted
from tests.polling import WAIT_SECONDS, until


@pytest.fixture
def gate(engine: FakeEngine) -> Iterator[Gate]:
    """Closed at the first token; opened at the end, so that nothing hangs in the daemon."""
    gate = Gate()
    engine.script = Script(gate=gate)
    yield gate
    gate.open()


def test_leaving_aborts_every_prompt_of_the_request(
    base_url: str, model: str, engine: FakeEngine, gate: Gate
) -> None:
    body = {"model": model, "prompt": ["a", "b", "c"], "stream": True}
    with posted(base_url, "/v1/completions", body):
        ids = {engine.at_gate.get(timeout=WAIT_SECONDS) for _ in range(3)}
    assert {engine.aborted.get(timeout=WAIT_SECONDS) for _ in range(3)} == ids


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_while_the_request_is_prepared_ends_the_preparation(
    departures: "Queue[LogRecord]", stream: bool
) -> None:
    """The second request waits for the one worker that the client may have, which encodes the
    first.
    """
    tokenizer = HeldTokenizer()
    path, body = "/v1/completions", {"prompt": "Hi", "stream": stream}
    with running(FakeEngine(tokenizer=tokenizer), Settings(port=0)) as base_url:
        try:
            with posted(base_url, path, body):
                tokenizer.encoding.get(timeout=WAIT_SECONDS)
                with posted(base_url, path, body):
                    until(lambda: uses_of_first_model(base_url) > EACH_AT_ONCE)
                assert path in departures.get(timeout=WAIT_SECONDS).getMessage()
        finally:
            tokenizer.gate.open()
    assert tokenizer.encoding.empty(), "the second prompt was never encoded"


def uses_of_first_model(base_url: str) -> int:
    return int(httpx.get(f"{base_url}/admin/models").json()["models"][0]["requests"])


def test_one_failing_prompt_aborts_its_siblings(
    http: httpx.Client, model: str, engine: FakeEngine, gate: Gate
) -> None:
    """The answer is one: there is nobody left to tell of the others."""
    engine.script = Script(fails_after_tokens=1)
    answer = http.post("/v1/completions", json={"model": model, "prompt": ["a", "b"]})
    assert answer.status_code == 500
    assert engine.submitted.qsize() == 2


def test_many_streams_at_once_all_complete(
    base_url: str, engine: FakeEngine, chat: ChatBody
) -> None:
    """All are in the engine before the first may go on."""
    gate = Gate()
    engine.script = Script(gate=gate)
    with _many(base_url, chat(stream=True), 64) as connections:
        for _ in connections:
            engine.at_gate.get(timeout=WAIT_SECONDS)
        gate.open()
        for connection in connections:
            received = connection.makefile("rb")
            assert any(line == b"data: [DONE]\n" for line in received)
            received.close()
    assert engine.aborted.empty()


@contextmanager
def _many(base_url: str, body: object, count: int) -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(posted(base_url, "/v1/chat/completions", body))
            for _ in range(count)
        ]
