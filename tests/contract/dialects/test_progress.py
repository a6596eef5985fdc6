"""How much of its prompt is read, in the streams of every dialect."""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import httpx

from tests.contract.dialects.adapters import DIALECTS, Dialect, Event
from tests.contract.fake_engine import FakeEngine, Script

ASKS = {"return_progress": True}
TEXT = "A long text. " * 20


def events_of(
    dialect: Dialect, http: httpx.Client, more: dict[str, Any], text: str = TEXT
) -> list[Event]:
    answer = dialect.post(http, stream=True, more=more, text=text)
    assert answer.status_code == 200, answer.text
    found = dialect.events(answer.text.splitlines())
    return [event for event in found if event is not None]


def told(events: Iterable[Event]) -> list[dict[str, int]]:
    return [event["prompt_progress"] for event in events if "prompt_progress" in event]


def test_a_stream_says_how_much_of_the_prompt_is_read_before_it_answers(
    dialect: Dialect, http: httpx.Client, engine: FakeEngine
) -> None:
    text = f"{dialect} has not read this yet. {TEXT}"
    events = events_of(dialect, http, ASKS, text)
    answer = dialect.streamed(events)
    progress = told(events)
    assert len(progress) >= 2
    assert {each["total"] for each in progress} == {answer.prompt_tokens}
    (cached,) = {each["cache"] for each in progress}
    assert cached < len(text) / 10, "what the template begins with, at most"
    assert all(one["processed"] < other["processed"] for one, other in pairwise(progress))
    assert progress[-1]["processed"] == answer.prompt_tokens
    first_text = min(index for index, event in enumerate(events) if "'H'" in str(event))
    assert all("prompt_progress" not in event for event in events[first_text:])
    plain = events_of(dialect, http, {}, text)
    assert told(plain) == []
    assert dialect.streamed(plain).text == answer.text
    numbers = [event["sequence_number"] for event in events if "sequence_number" in event]
    assert numbers == list(range(len(numbers)))


def test_cached_tokens_count_as_read(
    dialect: Dialect, http: httpx.Client, engine: FakeEngine
) -> None:
    events_of(dialect, http, {})
    events = events_of(dialect, http, ASKS)
    answer = dialect.streamed(events)
    first = told(events)[0]
    assert first["cache"] == first["processed"] > 0
    if answer.cached_tokens is not None:
        assert first["cache"] == answer.cached_tokens


def test_an_answer_in_one_piece_has_none(
    dialect: Dialect, http: httpx.Client, engine: FakeEngine
) -> None:
    answer = dialect.post(http, more=ASKS)
    assert dialect.read(answer).text
    assert "prompt_progress" not in answer.text
    assert not engine.submitted.get_nowait().reports_progress


def test_all_prompts_of_a_request_count_together(http: httpx.Client, engine: FakeEngine) -> None:
    body = {"prompt": ["One.", "Another one."], "n": 2, "stream": True, **ASKS}
    answer = http.post("/v1/completions", json=body)
    (dialect,) = (each for each in DIALECTS if each.path == "/v1/completions")
    progress = told(e for e in dialect.events(answer.text.splitlines()) if e is not None)
    n_tokens = sum(len(engine.submitted.get_nowait().prompt) for _ in range(2))
    assert {each["total"] for each in progress} == {n_tokens}
    assert progress[-1]["processed"] == n_tokens


def test_an_error_after_it_is_an_event_of_the_stream(
    dialect: Dialect, http: httpx.Client, engine: FakeEngine
) -> None:
    engine.script = Script(fails_after_tokens=0)
    events = events_of(dialect, http, ASKS)
    assert told(events)
    assert "it broke" in dialect.failure(events[-1])
