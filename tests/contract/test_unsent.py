"""What is computed and not read has a bound: the request that holds it ends and says why."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from server.settings import Settings
from tests.contract.access.helpers import CHAT
from tests.contract.daemon import running
from tests.contract.fake_engine import FakeEngine, Script
from tests.contract.wire import CHAT_PATH, LITTLE, WAIT_SECONDS, posted

LONG = Script(["x" * 450])
LARGE = CHAT | {"logprobs": True, "top_logprobs": 20}
"""A megabyte before it is rendered."""
SMALL = CHAT | {"logprobs": True, "top_logprobs": 0}
"""A fifth of that."""


@contextmanager
def daemon(**limits: Any) -> Iterator[tuple[FakeEngine, str]]:
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
    with daemon(max_unsent_bytes="1MB") as (engine, base_url):
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
        daemon(max_unsent_bytes="400KB") as (engine, base_url),
        httpx.stream("POST", f"{base_url}/v1/chat/completions", json=body) as answer,
    ):
        assert list(answer.iter_lines())[-2] == "data: [DONE]"
        assert engine.aborted.empty()


def test_what_the_last_events_of_a_stream_repeat_has_a_bound() -> None:
    """They have the whole response, so that its logprobs are kept although they have been sent."""
    body = {"input": "Hi", "stream": True}
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 0}
    with daemon(max_unsent_bytes="400KB") as (engine, base_url):
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
        daemon(max_unsent_bytes="400KB") as (engine, base_url),
        posted(base_url, CHAT_PATH, LARGE | {"stream": True}, is_deaf=True) as connection,
    ):
        assert engine.aborted.get(timeout=WAIT_SECONDS)
        received = connection.makefile("rb")
        assert error_event(received)["code"] == "answer_too_large"
        received.close()


def test_what_all_hold_is_taken_from_the_largest() -> None:
    with (
        daemon(max_total_unsent_bytes="600KB") as (engine, base_url),
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
        daemon(max_total_unsent_bytes="12MB") as (_, base_url),
        posted(base_url, CHAT_PATH, LARGE, is_deaf=True) as unread,
    ):
        assert unread.recv(1) == b"H"
        second = httpx.post(f"{base_url}/v1/chat/completions", json=LARGE, timeout=WAIT_SECONDS)
        assert second.status_code == 200
        received = unread.makefile("rb").read()
        assert 0 < len(received) < len(second.content)
