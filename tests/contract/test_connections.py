"""Clients that are silent, slow, many, or deaf: they end, and nobody else is harmed. What is
computed and not read has a bound.
"""

import json
import logging
import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.settings import Settings
from tests.contract.access.helpers import client_of, key_file, secret_of
from tests.contract.daemon import running
from tests.contract.fake_engine import FakeEngine, Gate, Script
from tests.contract.wire import CHAT_PATH, LITTLE, connected, is_healthy, posted, request_head
from tests.polling import WAIT_SECONDS

AT_ONCE = 0.05
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


def is_closed(connection: socket.socket) -> bool:
    """Whether the daemon has closed it; waits until it says something."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def status(connection: socket.socket) -> int:
    return int(connection.recv(65536).split(b" ")[1])


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost: loc"])
def test_a_head_that_does_not_come_ends_the_connection(sent: bytes) -> None:
    settings = Settings(port=0, header_timeout_seconds=AT_ONCE)
    with running(FakeEngine(), settings) as base_url, connected(base_url) as connection:
        connection.sendall(sent)
        assert is_closed(connection)


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def refusal(connection: socket.socket, begun: bytes, more: bytes) -> bytes:
    """What the daemon says to somebody who sends `more` again and again."""
    connection.sendall(begun)
    with suppress(ConnectionError):
        for _ in range(5000):
            connection.sendall(more)
        pytest.fail("the daemon reads on for ever")
    with suppress(ConnectionError):
        return connection.recv(65536)
    return b""


@pytest.mark.parametrize(
    ("begun", "more"),
    [
        (HEAD, b"X-More: and more\r\n" * 1000),
        (HEAD + b"X-Long: ", b"and longer " * 1000),
        (b"GET /", b"health" * 1000),
        (CHUNKED + b"2\r\n{}\r\n0\r\n", b"X-More: and more\r\n" * 1000),
        (CHUNKED + b"2;more=", b"more" * 1000),
        (request_head(json.dumps(CHAT).encode()) + HEAD, b"X-More: and more\r\n" * 1000),
    ],
    ids=["headers", "one header", "request line", "trailers", "chunk", "the next request"],
)
def test_what_comes_beside_bodies_is_bounded(begun: bytes, more: bytes) -> None:
    engine, gate = FakeEngine(), Gate()
    engine.script = Script(["x"], gate=gate)
    with running(engine, Settings(port=0)) as base_url, connected(base_url) as connection:
        assert refusal(connection, begun, more)[:12] in {b"", b"HTTP/1.1 400"}
        assert is_healthy(base_url)
        gate.open()


def test_a_body_in_small_chunks_is_no_head() -> None:
    """Its framing is longer than any head."""
    body = json.dumps(CHAT).encode() + b" " * 100_000
    content = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    with running(FakeEngine(), Settings(port=0)) as base_url, connected(base_url) as connection:
        connection.sendall(CHUNKED + content + b"0\r\n\r\n")
        assert status(connection) == 200


H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAAB\r\n"
"""What Java's client sends with its first request, if it is not told to speak HTTP/1.1 alone."""


def offering(request: bytes, offer: bytes = H2C) -> bytes:
    return request.replace(b"\r\n", b"\r\n" + offer, 1)


def test_a_request_that_offers_another_protocol_is_answered_in_this_one() -> None:
    """With its body, however that is framed and wherever reads part it from its head."""
    body = json.dumps(CHAT).encode()
    chunked = CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    engine = FakeEngine()
    with running(engine, Settings(port=0)) as base_url, connected(base_url) as connection:
        for request in (request_head(body), chunked, request_head(body)):
            head, _, content = offering(request).partition(b"\r\n\r\n")
            connection.sendall(head + b"\r\n\r\n")
            connection.sendall(content)
            assert status(connection) == 200
        assert engine.submitted.qsize() == 3


def test_an_idle_connection_ends_in_its_own_time() -> None:
    settings = Settings(port=0, idle_timeout_seconds=1)
    with running(FakeEngine(), settings) as base_url, connected(base_url) as connection:
        connection.sendall(b"HEAD /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert status(connection) == 200
        assert is_closed(connection)


def test_a_body_that_does_not_come_is_a_408() -> None:
    settings = Settings(port=0, body_timeout_seconds=AT_ONCE)
    with running(FakeEngine(), settings) as base_url, connected(base_url) as connection:
        connection.sendall(request_head(b'{"messages"', length=1000))
        assert status(connection) == 408
        assert is_healthy(base_url)


def test_a_client_that_reads_nothing_loses_its_place() -> None:
    """By the gate, at which the engine holds it, more has been sent than the sockets hold."""
    engine, gate = FakeEngine(), Gate()
    engine.script = Script(["x" * 450], gate=gate, gate_after_tokens=400)
    settings = Settings(port=0, send_timeout_seconds=AT_ONCE)
    with running(engine, settings, socket_options=LITTLE) as base_url:
        body = CHAT | {"stream": True, "logprobs": True, "top_logprobs": 20}
        with posted(base_url, CHAT_PATH, body, is_deaf=True):
            request_id = engine.submitted.get(timeout=WAIT_SECONDS).id
            assert engine.aborted.get(timeout=WAIT_SECONDS) == request_id
        gate.open()


def test_a_whole_answer_that_nobody_reads_is_dropped() -> None:
    engine = FakeEngine(Script(["x" * 450]))
    settings = Settings(port=0, send_timeout_seconds=AT_ONCE)
    body = CHAT | {"logprobs": True, "top_logprobs": 20}
    with (
        running(engine, settings, socket_options=LITTLE) as base_url,
        posted(base_url, CHAT_PATH, body, is_deaf=True) as connection,
    ):
        assert engine.submitted.get(timeout=WAIT_SECONDS)
        assert is_healthy(base_url)
        # It can end only with the daemon's reset: nothing is read before.
        with pytest.raises(ConnectionResetError):
            read_after_reset(connection)


def read_after_reset(connection: socket.socket) -> None:
    """Write until the other side's reset is noticed."""
    while True:
        connection.sendall(b"\r\n")


def test_a_client_that_reads_on_is_kept() -> None:
    """What it has not read for a while is all there."""
    engine = FakeEngine(Script(["x" * 450]))
    settings = Settings(port=0)
    with (
        running(engine, settings, socket_options=LITTLE) as base_url,
        posted(
            base_url, CHAT_PATH, CHAT | {"stream": True, "logprobs": True}, is_deaf=True
        ) as connection,
    ):
        assert engine.submitted.get(timeout=WAIT_SECONDS)
        assert is_healthy(base_url)
        received = connection.makefile("rb")
        lines = takewhile(lambda line: line != b"data: [DONE]\n", received)
        assert sum(line.count(b'"token":"x"') for line in lines) == 450
        received.close()


def test_a_client_that_sends_requests_ahead_and_leaves_is_no_error(
    base_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    ahead = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 300
    for _ in range(8):
        with connected(base_url) as connection:
            connection.sendall(ahead)
            connection.recv(1)
        assert is_healthy(base_url)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_silent_connections_make_room_for_those_that_speak() -> None:
    settings = Settings(port=0, max_connections=8)
    with running(FakeEngine(), settings) as base_url, ExitStack() as stack:
        silent = [stack.enter_context(connected(base_url)) for _ in range(100)]
        for connection in silent[:50]:
            connection.sendall(request_head(b"{", length=1000))
        assert is_healthy(base_url)
        assert all(is_closed(connection) for connection in silent[:92])
        assert is_healthy(base_url)


def test_more_requests_than_connections_are_refused_but_health_is_told() -> None:
    engine, gate = FakeEngine(), Gate()
    engine.script = Script(gate=gate)
    settings = Settings(port=0, max_connections=8)
    with running(engine, settings) as base_url, ExitStack() as stack:
        answered = [
            stack.enter_context(posted(base_url, "/v1/chat/completions", CHAT)) for _ in range(7)
        ]
        for _ in answered:
            engine.at_gate.get(timeout=WAIT_SECONDS)
        refused = httpx.post(f"{base_url}/v1/chat/completions", json=CHAT, timeout=WAIT_SECONDS)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "overloaded"
        assert int(refused.headers["retry-after"]) > 0
        assert httpx.get(f"{base_url}/v1/models", timeout=WAIT_SECONDS).status_code == 503
        assert is_healthy(base_url)
        gate.open()
        assert [status(connection) for connection in answered] == [200] * 7


def test_a_client_that_fills_the_budget_of_bodies_loses_its_own(tmp_path: Path) -> None:
    """Its bodies stop short of their end. None is as large as that of another client, which goes
    through.
    """
    keys = key_file(tmp_path, flood={}, other={})
    limit = 3_000_000
    settings = Settings(
        port=0, max_body_bytes=200_000, max_total_body_bytes=limit, api_keys_file=keys
    )
    head = request_head(b" " * 45_000, length=200_000)
    key = f"\r\nAuthorization: Bearer {secret_of('flood')}\r\n".encode()
    with (
        running(FakeEngine(), settings) as base_url,
        ExitStack() as stack,
        client_of(base_url, "other") as other,
    ):
        flood = [stack.enter_context(connected(base_url)) for _ in range(66)]
        for connection in flood:
            connection.sendall(head.replace(b"\r\n", key, 1))
        body = json.dumps(CHAT).encode().ljust(60_000)
        kind = {"Content-Type": "application/json"}
        assert other.post("/v1/chat/completions", content=body, headers=kind).status_code == 200
        evicted, _, _ = select.select(flood, [], [], WAIT_SECONDS)
        assert {status(connection) for connection in evicted} == {503}


def test_the_largest_body_gives_way() -> None:
    """Two that stop short of their end; a third one is too much, and a small one is not."""
    limit = 300_000
    settings = Settings(port=0, max_body_bytes=200_000, max_total_body_bytes=limit)
    with running(FakeEngine(), settings) as base_url, ExitStack() as stack:
        first, second, third = (stack.enter_context(connected(base_url)) for _ in range(3))
        for connection, size in ((first, 120_000), (second, 110_000)):
            connection.sendall(request_head(b" " * size, length=200_000))
        third.sendall(request_head(b" " * 100_000, length=200_000))
        assert status(first) == 503
        answer = httpx.post(f"{base_url}/v1/chat/completions", json=CHAT, timeout=WAIT_SECONDS)
        assert answer.status_code == 200


LONG = Script(["x" * 450])
LARGE = CHAT | {"logprobs": True, "top_logprobs": 20}
"""A megabyte before it is rendered."""
SMALL = CHAT | {"logprobs": True, "top_logprobs": 0}
"""A fifth of that."""


@contextmanager
def bounded(**limits: Any) -> Iterator[tuple[FakeEngine, str]]:
    engine = FakeEngine(LONG)
    settings = Settings(port=0, **limits)
    with running(engine, settings, socket_options=LITTLE) as base_url:
        yield engine, base_url


def error_event(lines: Iterator[bytes]) -> dict[str, Any]:
    """The error that a stream ends with."""
    line = next(line for line in lines if line.startswith(b'data: {"error"'))
    error: dict[str, Any] = json.loads(line.removeprefix(b"data: "))["error"]
    return error


def last_event(answer: httpx.Response) -> dict[str, Any]:
    *_, line = (line for line in answer.iter_lines() if line)
    event: dict[str, Any] = json.loads(line.removeprefix("data: "))
    return event


def test_a_whole_answer_that_grows_too_large_is_a_400() -> None:
    with bounded(max_unsent_bytes="1MB") as (engine, base_url):
        answer = httpx.post(f"{base_url}/v1/chat/completions", json=LARGE, timeout=WAIT_SECONDS)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "answer_too_large"
        assert "max_unsent_bytes" in answer.json()["error"]["message"]
        assert engine.aborted.get(timeout=WAIT_SECONDS)
        metrics = httpx.get(f"{base_url}/metrics").text
        assert "rootstock_answers_cut_off_total 1.0" in metrics
        small = httpx.post(f"{base_url}/v1/chat/completions", json=SMALL, timeout=WAIT_SECONDS)
        assert small.status_code == 200


def test_a_stream_that_is_read_has_no_bound() -> None:
    body = SMALL | {"stream": True}
    with (
        bounded(max_unsent_bytes="400KB") as (engine, base_url),
        httpx.stream("POST", f"{base_url}/v1/chat/completions", json=body) as answer,
    ):
        assert list(answer.iter_lines())[-2] == "data: [DONE]"
        assert engine.aborted.empty()


def test_what_the_last_events_of_a_stream_repeat_has_a_bound() -> None:
    """They have the whole response, so that its logprobs are kept although they have been sent."""
    body = {"input": "Hi", "stream": True}
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 0}
    with bounded(max_unsent_bytes="400KB") as (engine, base_url):
        url = f"{base_url}/v1/responses"
        assert (
            last_event(httpx.post(url, json=body, timeout=WAIT_SECONDS))["type"]
            == "response.completed"
        )
        assert engine.aborted.empty()
        failed = last_event(httpx.post(url, json=body | asked, timeout=WAIT_SECONDS))
        assert failed["type"] == "response.failed"
        assert "max_unsent_bytes" in failed["response"]["error"]["message"]


def test_a_stream_that_is_not_read_ends_with_an_error() -> None:
    """The work ends at once; the client learns of it when it reads on."""
    with (
        bounded(max_unsent_bytes="400KB") as (engine, base_url),
        posted(base_url, CHAT_PATH, LARGE | {"stream": True}, is_deaf=True) as connection,
    ):
        assert engine.aborted.get(timeout=WAIT_SECONDS)
        received = connection.makefile("rb")
        assert error_event(received)["code"] == "answer_too_large"
        received.close()


def test_what_all_hold_is_taken_from_the_largest() -> None:
    with (
        bounded(max_total_unsent_bytes="600KB") as (engine, base_url),
        posted(base_url, CHAT_PATH, SMALL | {"stream": True}, is_deaf=True) as small,
    ):
        engine.submitted.get(timeout=WAIT_SECONDS)
        with posted(base_url, CHAT_PATH, LARGE | {"stream": True}, is_deaf=True) as large:
            large_id = engine.submitted.get(timeout=WAIT_SECONDS).id
            assert engine.aborted.get(timeout=WAIT_SECONDS) == large_id
            received = large.makefile("rb")
            assert error_event(received)["code"] == "overloaded"
            received.close()
        received = small.makefile("rb")
        assert any(line == b"data: [DONE]\n" for line in received)
        received.close()


def test_an_answer_holds_memory_until_it_has_been_read() -> None:
    """Two fit one after the other. The first, which nobody reads, makes way for the second."""
    with (
        bounded(max_total_unsent_bytes="12MB") as (_, base_url),
        posted(base_url, CHAT_PATH, LARGE, is_deaf=True) as unread,
    ):
        assert unread.recv(1) == b"H"
        second = httpx.post(f"{base_url}/v1/chat/completions", json=LARGE, timeout=WAIT_SECONDS)
        assert second.status_code == 200
        received = unread.makefile("rb").read()
        assert 0 < len(received) < len(second.content)
