"""A client that leaves takes its work with it, wherever the work is."""

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from logging import LogRecord
from queue import Queue
from urllib.parse import urlsplit

import httpx
import pytest

from server.settings import Settings
from server.workers import EACH_AT_ONCE
from tests.contract.conftest import ChatBody, StrictClient, strict_client
from tests.contract.daemon import running
from tests.contract.fake_engine import ByteTokenizer, FakeEngine, Gate, Script

WAIT_SECONDS = 20


@pytest.fixture
def gate(engine: FakeEngine) -> Iterator[Gate]:
    """Closed at the first token; opened at the end, so that nothing hangs in the daemon."""
    gate = Gate()
    engine.script = Script(gate=gate)
    yield gate
    gate.open()


@contextmanager
def posted(base_url: str, path: str, body: object) -> Iterator[socket.socket]:
    """A connection with the request sent, closed when the block ends."""
    address = urlsplit(base_url)
    content = json.dumps(body).encode()
    with socket.create_connection((address.hostname, address.port), WAIT_SECONDS) as connection:
        connection.sendall(
            f"POST {path} HTTP/1.1\r\nHost: {address.netloc}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n".encode()
            + content
        )
        yield connection


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_before_the_first_token_aborts(
    base_url: str, chat: ChatBody, engine: FakeEngine, gate: Gate, stream: bool
) -> None:
    with posted(base_url, "/v1/chat/completions", chat(stream=stream)):
        request_id = engine.at_gate.get(timeout=WAIT_SECONDS)
    assert engine.aborted.get(timeout=WAIT_SECONDS) == request_id


def test_leaving_in_mid_stream_aborts(
    base_url: str, chat: ChatBody, engine: FakeEngine, gate: Gate
) -> None:
    engine.script.gate_after_tokens = 3
    with posted(base_url, "/v1/chat/completions", chat(stream=True)) as connection:
        request_id = engine.at_gate.get(timeout=WAIT_SECONDS)
        assert connection.recv(1).startswith(b"H")
    assert engine.aborted.get(timeout=WAIT_SECONDS) == request_id


def test_leaving_aborts_every_prompt_of_the_request(
    base_url: str, model: str, engine: FakeEngine, gate: Gate
) -> None:
    body = {"model": model, "prompt": ["a", "b", "c"], "stream": True}
    with posted(base_url, "/v1/completions", body):
        ids = {engine.at_gate.get(timeout=WAIT_SECONDS) for _ in range(3)}
    assert {engine.aborted.get(timeout=WAIT_SECONDS) for _ in range(3)} == ids


@dataclass(frozen=True)
class HeldTokenizer(ByteTokenizer):
    """Encodes prompts only once its gate is open."""

    gate: Gate = field(default_factory=Gate)
    encoding: "Queue[str]" = field(default_factory=Queue)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.encoding.put(text)
        self.gate.wait()
        return super().encode(text, add_special_tokens=add_special_tokens)


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
                    uses_of_first_model(base_url, EACH_AT_ONCE + 1)
                assert path in departures.get(timeout=WAIT_SECONDS).getMessage()
        finally:
            tokenizer.gate.open()
    assert tokenizer.encoding.empty(), "the second prompt was never encoded"


def uses_of_first_model(base_url: str, n: int) -> None:
    """Returns when n requests use the model."""
    while httpx.get(f"{base_url}/admin/models").json()["models"][0]["requests"] < n:
        pass


def test_closing_the_clients_stream_aborts(
    client: StrictClient, model: str, engine: FakeEngine, gate: Gate
) -> None:
    engine.script.gate_after_tokens = 5
    messages = [{"role": "user", "content": "Hi"}]
    stream = client.chat.completions.create(model=model, messages=messages, stream=True)
    assert next(iter(stream)).choices[0].delta.role == "assistant"
    stream.close()
    assert engine.aborted.get(timeout=WAIT_SECONDS)


def test_one_failing_prompt_aborts_its_siblings(
    http: httpx.Client, model: str, engine: FakeEngine, gate: Gate
) -> None:
    """The answer is one: there is nobody left to tell of the others."""
    engine.script = Script(fails_after_tokens=1)
    answer = http.post("/v1/completions", json={"model": model, "prompt": ["a", "b"]})
    assert answer.status_code == 500
    assert engine.submitted.qsize() == 2


def test_a_silent_stream_is_kept_alive_and_then_complete() -> None:
    engine, gate = FakeEngine(), Gate()
    engine.script = Script(gate=gate)
    with running(engine, Settings(port=0, keepalive_seconds=0.01)) as base_url:
        body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
        with posted(base_url, "/v1/chat/completions", body) as connection:
            received = connection.makefile("rb")
            assert any(line.startswith(b": keep-alive") for line in received)
            gate.open()
            assert any(line == b"data: [DONE]\n" for line in received)
            received.close()


def test_keep_alives_are_nothing_to_the_client() -> None:
    engine, gate = FakeEngine(), Gate()
    engine.script = Script(gate=gate, gate_after_tokens=2)
    settings = Settings(port=0, keepalive_seconds=0.01)
    with running(engine, settings) as base_url, strict_client(base_url) as client:
        messages = [{"role": "user", "content": "Hi"}]
        text = ""
        for chunk in client.chat.completions.create(model="", messages=messages, stream=True):
            text += chunk.choices[0].delta.content or ""
            if text == "He" and not gate.is_open:
                gate.open()
    assert text == "Hello, wörld!"


def test_a_late_refusal_is_an_event() -> None:
    """Once keep-alives have begun the status is sent: what fails then says so in the stream."""
    engine, gate = FakeEngine(), Gate()
    engine.script = Script(gate=gate, fails_after_tokens=0)
    with running(engine, Settings(port=0, keepalive_seconds=0.01)) as base_url:
        body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
        with posted(base_url, "/v1/chat/completions", body) as connection:
            received = connection.makefile("rb")
            assert any(line.startswith(b": keep-alive") for line in received)
            gate.open()
            assert any(b'"code":"generation_failed"' in line for line in received)
            received.close()


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
