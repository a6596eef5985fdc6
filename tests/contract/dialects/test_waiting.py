"""Streams that wait are kept alive, those that wait too long end, and who leaves is not computed
for.
"""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.contract.dialects.adapters import DIALECTS, Dialect, Event
from tests.contract.dialects.conftest import KEEPALIVE_SECONDS, STREAMS
from tests.contract.fake_engine import Gate
from tests.contract.scripted import Daemon
from tests.contract.wire import posted
from tests.polling import WAIT_SECONDS

MID_STREAM_SECONDS = 3.0  # in which the first tokens come, on a slow machine too


def opened_at_a_ping(
    dialect: Dialect, events: Iterator[Event | None], gate: Gate
) -> Iterator[Event | None]:
    """The events, pings among them. The gate is opened at the third ping."""
    n_pings = 0
    for event in events:
        n_pings += dialect.is_ping(event)
        if n_pings >= 3:
            gate.open()
        yield event


@pytest.mark.parametrize("after_tokens", [0, 2])
def test_a_stream_that_waits_for_a_token_is_pinged_and_then_complete(
    slow: Daemon, dialect: Dialect, gate: Gate, after_tokens: int
) -> None:
    slow.say("Hello", gate=gate, gate_after_tokens=after_tokens)
    with slow.http.stream("POST", dialect.path, json=dialect.stream_body()) as answer:
        events = dialect.events(answer.iter_lines())
        said = [event for event in opened_at_a_ping(dialect, events, gate) if event is not None]
    assert dialect.streamed(said).text == "Hello"


def test_the_client_passes_over_pings(slow: Daemon, dialect: Dialect, gate: Gate) -> None:
    slow.say("Hello", gate=gate, gate_after_tokens=2)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(dialect.ask, slow, stream=True)
        slow.engine.at_gate.get(timeout=WAIT_SECONDS)
        time.sleep(10 * KEEPALIVE_SECONDS)
        gate.open()
        assert asked.result(WAIT_SECONDS).text == "Hello"


def test_what_fails_after_a_ping_is_an_event(slow: Daemon, dialect: Dialect, gate: Gate) -> None:
    """The status has been sent by then."""
    slow.say("Hello", gate=gate, fails_after_tokens=0)
    with slow.http.stream("POST", dialect.path, json=dialect.stream_body()) as answer:
        assert answer.status_code == 200
        *_, last = opened_at_a_ping(dialect, dialect.events(answer.iter_lines()), gate)
    assert last is not None
    assert dialect.failure(last) == "it broke"


@STREAMS
def test_leaving_before_the_first_token_aborts(
    hermes: Daemon, dialect: Dialect, gate: Gate, stream: bool
) -> None:
    hermes.say("Hello", gate=gate)
    with posted(hermes.url, dialect.path, dialect.body() | {"stream": stream}):
        request_id = hermes.engine.at_gate.get(timeout=WAIT_SECONDS)
    assert hermes.engine.aborted.get(timeout=WAIT_SECONDS) == request_id


def test_leaving_in_mid_stream_aborts(hermes: Daemon, dialect: Dialect, gate: Gate) -> None:
    hermes.say("Hello", gate=gate, gate_after_tokens=3)
    with posted(hermes.url, dialect.path, dialect.stream_body()) as connection:
        request_id = hermes.engine.at_gate.get(timeout=WAIT_SECONDS)
        assert connection.recv(1) == b"H"
    assert hermes.engine.aborted.get(timeout=WAIT_SECONDS) == request_id


@pytest.fixture(scope="module")
def hasty(no_settings_from_outside: None) -> Iterator[Daemon]:
    """A daemon whose answers must be over in a fifth of a second, and never begin."""
    with Daemon.serving(request_timeout_seconds=0.2) as made:
        made.say("Hello", gate=Gate())
        yield made


@STREAMS
def test_an_answer_that_has_not_begun_in_time_is_a_504(
    hasty: Daemon, dialect: Dialect, stream: bool
) -> None:
    """On a slow machine it may not reach the engine."""
    answer = dialect.post(hasty.http, stream=stream)
    message, kind = dialect.error(answer)
    assert answer.status_code == 504
    assert "request_timeout_seconds" in message
    assert kind in {"request_timeout", "timeout_error", None}
    for _ in range(hasty.engine.submitted.qsize()):
        hasty.engine.submitted.get()
        request_id = hasty.engine.aborted.get(timeout=WAIT_SECONDS)
        assert request_id.startswith(answer.headers["x-request-id"])


def test_an_answer_that_has_begun_ends_in_time_with_an_event() -> None:
    """All dialects at once: they wait for the same seconds."""

    def ask(dialect: Dialect) -> httpx.Response:
        return dialect.post(late.http, stream=True)

    with (
        Daemon.serving(request_timeout_seconds=MID_STREAM_SECONDS) as late,
        ThreadPoolExecutor(len(DIALECTS)) as pool,
    ):
        late.say("Hello", gate=Gate(), gate_after_tokens=3)
        answers = list(pool.map(ask, DIALECTS))
        aborted = {late.engine.aborted.get(timeout=WAIT_SECONDS) for _ in DIALECTS}
    for dialect, answer in zip(DIALECTS, answers, strict=True):
        assert answer.status_code == 200
        *_, last = dialect.events(answer.text.splitlines())
        assert last is not None
        assert "request_timeout_seconds" in dialect.failure(last)
    assert len(aborted) == len(DIALECTS)
