"""What a request has held is freed when it is over, and not when Python looks for garbage: full
collections are rare, so cycles that hold parsed bodies would add up to gigabytes.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from engine.api import QueueFull
from server.fairness import Reservation
from server.http.connections import Connection
from server.json_model import RequestModel
from server.record import RequestRecord
from server.settings import Settings
from tests.contract.daemon import running
from tests.contract.dialects.adapters import BODIES
from tests.contract.fake_engine import FakeEngine, Gate, Script
from tests.contract.wire import posted
from tests.polling import WAIT_SECONDS, until

CHAT = "/v1/chat/completions"
HELD = (RequestRecord, RequestModel, Reservation, Connection)


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="module")
def url(engine: FakeEngine, no_settings_from_outside: None) -> Iterator[str]:
    with running(engine, Settings(port=0)) as url:
        yield url


def held() -> list[object]:
    """What requests hold: parsed bodies and their parts are among it."""
    return [each for each in gc.get_objects() if isinstance(each, HELD)]


@contextmanager
def nothing_left() -> Iterator[None]:
    """Fails if something is held after the block that would take a garbage collection to free."""
    gc.collect()
    others = held()  # of other tests, whose daemons may go on
    ids = {id(each) for each in others}
    gc.disable()
    try:
        yield
        until(
            lambda: [type(each).__name__ for each in held() if id(each) not in ids],
            lambda left: not left,
        )
    finally:
        gc.enable()


def status(url: str, path: str, **fields: object) -> int:
    return httpx.post(f"{url}{path}", json=BODIES[path] | fields, timeout=WAIT_SECONDS).status_code


@pytest.mark.parametrize("stream", [False, True])
def test_answers_leave_nothing(engine: FakeEngine, url: str, stream: bool) -> None:
    """All dialects at once: looking for what is left takes longer than they do."""
    engine.script = Script()
    with nothing_left():
        assert {status(url, path, stream=stream) for path in BODIES} == {200}


def test_bodies_that_are_refused_leave_nothing(url: str) -> None:
    with nothing_left():
        assert {status(url, path, stream=1.5) for path in BODIES} == {400}


@pytest.mark.parametrize("stream", [False, True])
def test_refusals_of_the_engine_leave_nothing(engine: FakeEngine, url: str, stream: bool) -> None:
    with nothing_left():
        engine.script = Script(refusal=QueueFull("full", 3))
        assert {status(url, path, stream=stream) for path in BODIES} == {429}
        engine.script = Script()


def test_a_prompt_that_is_too_long_leaves_nothing(url: str) -> None:
    messages = [{"role": "user", "content": "Hi"}] * 1000
    with nothing_left():
        assert status(url, CHAT, messages=messages) == 400


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_leaves_nothing(engine: FakeEngine, url: str, stream: bool) -> None:
    gate = Gate()
    engine.script = Script(gate=gate)
    with nothing_left():
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}{CHAT}", json=BODIES[CHAT] | {"stream": stream}, timeout=0.2)
        gate.open()
    engine.script = Script()


@pytest.mark.parametrize("stream", [False, True])
def test_a_missed_deadline_leaves_nothing(stream: bool) -> None:
    gated = FakeEngine(Script(gate=Gate()))
    with running(gated, Settings(port=0, request_timeout_seconds=0.2)) as url, nothing_left():
        assert status(url, CHAT, stream=stream) == 504


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_nothing_of_the_body_is_held_while_the_answer_is_written(
    engine: FakeEngine, url: str, path: str, stream: bool
) -> None:
    engine.script = Script(gate=Gate())
    while not engine.at_gate.empty():
        engine.at_gate.get()
    gc.collect()
    others = held()
    with posted(url, path, BODIES[path] | {"stream": stream}):
        engine.at_gate.get(timeout=WAIT_SECONDS)
        gc.collect()
        own = [each for each in held() if not any(each is other for other in others)]
        assert [each for each in own if isinstance(each, RequestModel)] == []
    engine.script = Script()


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_evicted_leaves_nothing(stream: bool) -> None:
    engine = FakeEngine(Script(["x" * 450], steps_at_once=100))
    with running(engine, Settings(port=0, max_unsent_bytes=2000)) as url, nothing_left():
        assert status(url, CHAT, stream=stream, logprobs=True, top_logprobs=20) in (200, 400)
        assert engine.aborted.get(timeout=WAIT_SECONDS)
