"""`background`: an answer is made while nobody waits, and asked for later."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import BadRequestError, InternalServerError, RateLimitError

from engine.api import QueueFull
from server.dialects.responses.store import ResponseStore
from tests.contract.access.helpers import client_of, key_file
from tests.contract.fake_engine import Gate, Script
from tests.contract.responses.conftest import Created
from tests.contract.scripted import Daemon
from tests.polling import WAIT_SECONDS, until

Polled = Callable[[str], Any]


@pytest.fixture
def gate(hermes: Daemon) -> Iterator[Gate]:
    """Closed at the third token; opened at the end, so that nothing hangs in the daemon."""
    gate = Gate()
    hermes.engine.script = Script(answers=("Fine.",), gate=gate, gate_after_tokens=2)
    yield gate
    gate.open()


@pytest.fixture
def ended(hermes: Daemon) -> Polled:
    """The response when it is no longer being made."""

    def over(id: str) -> Any:
        read = partial(hermes.openai.responses.retrieve, id)
        return until(read, lambda found: found.status not in {"queued", "in_progress"})

    return over


def test_it_is_made_after_the_answer(
    hermes: Daemon, create: Created, gate: Gate, ended: Polled
) -> None:
    made = create(background=True)
    assert (made.status, made.output, made.background) == ("queued", [], True)
    hermes.engine.at_gate.get(timeout=WAIT_SECONDS)
    assert hermes.openai.responses.retrieve(made.id).status == "in_progress"
    gate.open()
    response = ended(made.id)
    assert (response.status, response.output_text) == ("completed", "Fine.")
    create(previous_response_id=made.id)
    assert [message["content"] for message in hermes.given[0]] == ["Hi", "Fine.", "Hi"]


def test_what_it_is_made_from_is_there_at_once(hermes: Daemon, create: Created, gate: Gate) -> None:
    gated = hermes.engine.script
    hermes.say("Fine.")
    before = create(input="Before")
    hermes.engine.script = gated
    made = create(input="Now", background=True, previous_response_id=before.id)
    listed = hermes.openai.responses.input_items.list(made.id, order="asc")
    assert [item.content[0].text for item in listed] == ["Before", "Fine.", "Now"]
    hermes.openai.responses.cancel(made.id)


def wait_for_abort(hermes: Daemon, request_id: str) -> None:
    """Requests of tests before may be aborted late."""
    until(partial(hermes.engine.aborted.get, timeout=WAIT_SECONDS), lambda id: id == request_id)


def test_cancelling_aborts(hermes: Daemon, create: Created, gate: Gate) -> None:
    made = create(background=True)
    request_id = hermes.engine.at_gate.get(timeout=WAIT_SECONDS)
    cancelled = hermes.openai.responses.cancel(made.id)
    assert (cancelled.id, cancelled.status) == (made.id, "cancelled")
    wait_for_abort(hermes, request_id)
    assert hermes.openai.responses.retrieve(made.id).status == "cancelled"
    assert hermes.openai.responses.cancel(made.id).status == "cancelled"


def test_deleting_aborts(hermes: Daemon, create: Created, gate: Gate) -> None:
    made = create(background=True)
    request_id = hermes.engine.at_gate.get(timeout=WAIT_SECONDS)
    hermes.openai.responses.delete(made.id)
    wait_for_abort(hermes, request_id)


def test_a_complete_one_stays_as_it_is(hermes: Daemon, create: Created, ended: Polled) -> None:
    made = create(background=True)
    assert ended(made.id).status == "completed"
    assert hermes.openai.responses.cancel(made.id).status == "completed"


def test_others_cannot_be_cancelled(hermes: Daemon, create: Created) -> None:
    with pytest.raises(BadRequestError):
        hermes.openai.responses.cancel(create().id)


@pytest.mark.parametrize(
    ("script", "code"),
    [
        (Script(fails_after_tokens=2), "server_error"),
        (Script(refusal=QueueFull("full", retry_after_seconds=1)), "rate_limit_exceeded"),
    ],
)
def test_a_failure_is_told_later(
    hermes: Daemon, create: Created, ended: Polled, script: Script, code: str
) -> None:
    hermes.engine.script = script
    response = ended(create(background=True).id)
    assert (response.status, response.error.code) == ("failed", code)


def test_one_that_cannot_be_stored_ends_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Storing raises once for the answer, and again for the failure that this is."""
    n_tries, put = 0, ResponseStore.put

    def fails_twice(*response: Any) -> None:
        nonlocal n_tries
        n_tries += 1
        if n_tries <= 2:
            raise OSError("no room")
        put(*response)

    monkeypatch.setattr(ResponseStore, "put", fails_twice)
    with Daemon.serving() as alone:
        create = alone.openai.responses.create
        url = f"{alone.url}/v1/responses/{create(model='bytes', input='Hi', background=True).id}"
        until(lambda: not httpx.get(url).is_success)
        assert (httpx.get(url).status_code, n_tries) == (404, 2)
        again = create(model="bytes", input="Hi", background=True)
        stored = f"{alone.url}/v1/responses/{again.id}"
        until(lambda: httpx.get(stored).json()["status"] == "completed")


def test_a_request_that_cannot_be_served_is_refused_at_once(create: Created) -> None:
    with pytest.raises(BadRequestError) as refused:
        create(background=True, input="x" * 600)
    assert refused.value.code == "context_length_exceeded"


def test_there_are_only_so_many() -> None:
    with Daemon.serving(max_background_responses=1) as small:
        gate = Gate()
        small.engine.script = Script(gate=gate)
        create = small.openai.responses.create
        first = create(model="bytes", input="Hi", background=True)
        with pytest.raises(RateLimitError) as refused:
            create(model="bytes", input="Hi", background=True)
        assert "max_background_responses" in refused.value.message
        small.openai.responses.cancel(first.id)
        gate.open()
        assert create(model="bytes", input="Hi", background=True).status == "queued"


def test_what_they_were_asked_counts_as_a_body_until_they_end() -> None:
    """A format's description is sent back and no part of the prompt. It is less than half of what
    all bodies may have, so a larger body is refused however it arrives.
    """
    with Daemon.serving(max_body_bytes=110_000, max_total_body_bytes=190_000) as small:
        gate = Gate()
        small.engine.script = Script(gate=gate)
        create = partial(small.openai.responses.create, model="bytes", input="Hi")
        text = {"format": {"type": "text", "description": "x" * 90_000}}
        first = create(background=True, text=text)
        larger = {"format": {"type": "text", "description": "x" * 100_000}}
        with pytest.raises(InternalServerError) as refused:
            create(text=larger)
        assert "bodies" in refused.value.message
        small.openai.responses.cancel(first.id)
        gate.open()

        def created() -> Any:
            """None while the one that was cancelled is still ending."""
            with suppress(InternalServerError):
                return create(text=text)

        assert until(created).status == "completed"


def test_they_end_when_the_daemon_drains() -> None:
    """Leaving the block waits for the daemon's end."""
    with Daemon.serving(drain_timeout_seconds=0) as stopping:
        stopping.engine.script = Script(gate=Gate())
        stopping.openai.responses.create(model="bytes", input="Hi", background=True)
        stopping.engine.at_gate.get(timeout=WAIT_SECONDS)


def test_one_key_leaves_places_to_the_others(tmp_path: Path) -> None:
    keys = key_file(tmp_path, flood={}, victim={})
    with Daemon.serving(api_keys_file=keys, max_background_responses=8) as shared:
        gate = Gate()
        shared.engine.script = Script(gate=gate)
        made = {"flood": 0, "victim": 0}
        body = {"input": "Hi", "background": True}
        for name, asked in (("flood", 8), ("victim", 1), ("flood", 8), ("victim", 3)):
            with client_of(shared.url, name) as client:
                for _ in range(asked):
                    status = client.post("/v1/responses", json=body).status_code
                    assert status in (200, 429)
                    made[name] += status == 200
        gate.open()
        assert made == {"flood": 4, "victim": 2}
