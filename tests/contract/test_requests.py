"""Who is being served, the log of who was, the series, and the end that an admin puts to one."""

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from engine.api import QueueFull
from engine.values.request import WaitReason
from server.admin.activity import INTERVAL_SECONDS, SHOWN_REQUESTS
from server.settings import Settings
from tests.contract.access.helpers import client_of, key_file
from tests.contract.daemon import running
from tests.contract.fake_engine import FakeEngine, Gate, Script
from tests.contract.scripted import CLIENT_SECONDS
from tests.contract.wire import posted
from tests.polling import WAIT_SECONDS, until

STREAM = "/admin/activity/stream"
SECRET_TEXT = "nobody may read this"
BODIES: Mapping[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": SECRET_TEXT}]},
    "/v1/completions": {"prompt": SECRET_TEXT},
    "/v1/responses": {"input": SECRET_TEXT},
    "/v1/messages": {"messages": [{"role": "user", "content": SECRET_TEXT}], "max_tokens": 99},
    "/api/chat": {"messages": [{"role": "user", "content": SECRET_TEXT}], "stream": False},
    "/api/generate": {"prompt": SECRET_TEXT, "stream": False},
}
ENDED = "An admin of this server has ended the request."


@pytest.fixture
def url(no_settings_from_outside: None, engine: FakeEngine) -> Iterator[str]:
    """A daemon of its own, whose log is empty."""
    with running(engine, Settings(port=0)) as url:
        yield url


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=CLIENT_SECONDS) as client:
        yield client


@pytest.fixture
def gate(engine: FakeEngine) -> Iterator[Gate]:
    """Closed behind the third token; opened at the end, so that nothing hangs in the daemon."""
    engine.script = Script(gate=(gate := Gate()), gate_after_tokens=3)
    yield gate
    gate.open()


def live(http: httpx.Client) -> list[dict[str, Any]]:
    return list(http.get("/admin/requests").json()["requests"])


def log(http: httpx.Client) -> list[dict[str, Any]]:
    return list(http.get("/admin/requests/log").json()["requests"])


@contextmanager
def asking(http: httpx.Client, path: str, **fields: object) -> Iterator[httpx.Response]:
    """A stream of which nothing has been read."""
    with http.stream("POST", path, json={**BODIES[path], **fields, "stream": True}) as answer:
        yield answer


@pytest.mark.parametrize("path", BODIES)
def test_a_request_is_listed_while_it_is_answered_and_logged_when_it_is_over(
    http: httpx.Client, engine: FakeEngine, gate: Gate, path: str
) -> None:
    with asking(http, path) as answer:
        engine.at_gate.get(timeout=WAIT_SECONDS)
        (row,) = live(http)
        gate.open()
        answer.read()
    request_id = answer.headers["x-request-id"]
    assert row["id"] == request_id
    assert (row["route"], row["client"], row["key"]) == (path, "127.0.0.1", None)
    assert (row["status"], row["waits_for"]) == ("running", None)
    assert row["output_tokens"] == 3
    assert row["first_token_seconds"] >= 0
    assert live(http) == []
    (over,) = log(http)
    assert (over["id"], over["route"], over["status"]) == (request_id, path, 200)
    assert over["output_tokens"] > 3
    assert over["prompt_tokens"] == row["prompt_tokens"] >= len(SECRET_TEXT)
    for told in (row, over):
        assert SECRET_TEXT not in json.dumps(told)


def test_who_sent_a_request_is_told_by_its_agent(http: httpx.Client) -> None:
    agents = {"User-Agent": "claude-cli/2.0.14 (external, cli)"}, {"User-Agent": "curl/8.5.0"}
    for headers in agents:
        answer = http.post(
            "/v1/completions", json=BODIES["/v1/completions"], headers=headers
        ).raise_for_status()
        assert answer.status_code == 200
    assert [over["agent"] for over in log(http)] == ["curl", "Claude Code"]


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/v1/completions", {"model": "nope", "prompt": SECRET_TEXT}, 404, "model_not_found"),
        ("/v1/completion", {"prompt": SECRET_TEXT}, 404, "unknown_url"),
        ("/v1/completions", {"prompt": SECRET_TEXT, "max_tokens": "many"}, 400, None),
    ],
)
def test_what_is_refused_before_it_reaches_an_engine_is_logged(
    http: httpx.Client, path: str, body: dict[str, Any], status: int, code: str | None
) -> None:
    assert http.post(path, json=body).status_code == status
    (over,) = until(lambda: log(http))
    assert (over["route"], over["status"], over["code"]) == (path, status, code)
    assert (over["client"], over["agent"]) == ("127.0.0.1", "python-httpx")
    assert (over["prompt_tokens"], over["first_token_seconds"]) == (0, None)
    assert SECRET_TEXT not in json.dumps(over)


def test_what_was_cached_is_told(http: httpx.Client) -> None:
    for _ in range(2):
        http.post("/v1/completions", json=BODIES["/v1/completions"]).raise_for_status()
    warm, cold = log(http)
    assert (cold["cached_tokens"], warm["cached_tokens"]) == (0, len(SECRET_TEXT) - 1)
    assert (cold["number"], warm["number"]) == (1, 2), "the latest comes first"


def test_what_drafts_had_right_is_told_while_it_is_answered_and_then(
    http: httpx.Client, engine: FakeEngine, gate: Gate
) -> None:
    engine.script.answers, engine.script.expected = ("abcdef", "abcxyz"), "abcd"
    with asking(http, "/v1/completions", n=2) as answer:
        engine.at_gate.get(timeout=WAIT_SECONDS)
        (row,) = live(http)
        gate.open()
        answer.read()
    (over,) = log(http)
    assert (row["output_tokens"], row["accepted_draft_tokens"]) == (6, 6)
    assert (over["output_tokens"], over["accepted_draft_tokens"]) == (12, 7)


@pytest.mark.parametrize("reason", WaitReason)
def test_who_waits_says_why(
    http: httpx.Client, engine: FakeEngine, gate: Gate, reason: WaitReason
) -> None:
    engine.waits_for = reason
    with asking(http, "/v1/completions", n=3):
        engine.at_gate.get(timeout=WAIT_SECONDS)
        (row,) = live(http)
    assert (row["status"], row["waits_for"], row["sequences"]) == ("waiting", reason, 3)


def test_a_list_of_prompts_is_one_request(
    http: httpx.Client, engine: FakeEngine, gate: Gate
) -> None:
    with asking(http, "/v1/completions", prompt=["one", "three"], n=2) as answer:
        engine.at_gate.get(timeout=WAIT_SECONDS)
        (row,) = live(http)
        gate.open()
        answer.read()
    (over,) = log(http)
    for told in (row, over):
        assert (told["sequences"], told["prompt_tokens"]) == (4, len("onethree"))


@pytest.mark.parametrize("path", BODIES)
def test_an_admin_ends_an_answer_before_it_begins(
    http: httpx.Client, engine: FakeEngine, gate: Gate, path: str
) -> None:
    engine.script.gate_after_tokens = 0
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(http.post, path, json=BODIES[path])
        engine_id = engine.at_gate.get(timeout=WAIT_SECONDS)
        assert http.post(f"/admin/requests/{live(http)[0]['id']}/cancel").status_code == 204
        answer = asked.result(WAIT_SECONDS)
    assert answer.status_code == 410
    assert ENDED in str(answer.json()["error"])
    assert engine.aborted.get(timeout=WAIT_SECONDS) == engine_id
    (over,) = log(http)
    assert (over["status"], over["code"]) == (410, "ended_by_admin")


@pytest.mark.parametrize("path", BODIES)
def test_an_admin_ends_a_stream(
    http: httpx.Client, engine: FakeEngine, gate: Gate, path: str
) -> None:
    with asking(http, path) as answer:
        engine_id = engine.at_gate.get(timeout=WAIT_SECONDS)
        assert http.post(f"/admin/requests/{live(http)[0]['id']}/cancel").status_code == 204
        assert ENDED in answer.read().decode(), "its last event"
    assert answer.status_code == 200
    assert engine.aborted.get(timeout=WAIT_SECONDS) == engine_id
    assert [over["status"] for over in log(http)] == [410]


def test_an_admin_ends_a_response_in_the_background(
    http: httpx.Client, engine: FakeEngine, gate: Gate
) -> None:
    begun = http.post("/v1/responses", json={**BODIES["/v1/responses"], "background": True}).json()
    engine.at_gate.get(timeout=WAIT_SECONDS)
    (row,) = live(http)
    http.post(f"/admin/requests/{row['id']}/cancel").raise_for_status()
    assert engine.aborted.get(timeout=WAIT_SECONDS)
    stored = until(
        lambda: http.get(f"/v1/responses/{begun['id']}").json(),
        lambda found: found["status"] != "in_progress",
    )
    assert stored["status"] == "failed"
    assert stored["error"]["message"] == ENDED


def test_others_go_on(http: httpx.Client, engine: FakeEngine, gate: Gate) -> None:
    with asking(http, "/v1/completions"), asking(http, "/v1/chat/completions") as other:
        for _ in range(2):
            engine.at_gate.get(timeout=WAIT_SECONDS)
        ended = next(row for row in live(http) if row["route"] == "/v1/completions")
        http.post(f"/admin/requests/{ended['id']}/cancel").raise_for_status()
        gate.open()
        assert ENDED not in other.read().decode()


@pytest.mark.parametrize(
    ("id", "status", "code"), [("0" * 32, 404, "no_such_request"), ("none", 400, None)]
)
def test_who_is_not_there_cannot_be_ended(
    http: httpx.Client, id: str, status: int, code: str | None
) -> None:
    answer = http.post(f"/admin/requests/{id}/cancel")
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert answer.json()["error"]["param"] == "id"


def test_refusals_and_failures_are_logged(http: httpx.Client, engine: FakeEngine) -> None:
    engine.script = Script(refusal=QueueFull("full", 1))
    assert http.post("/v1/completions", json=BODIES["/v1/completions"]).status_code == 429
    engine.script = Script(fails_after_tokens=2)
    with asking(http, "/v1/completions") as answer:
        answer.read()
    found = [(over["status"], over["code"], over["output_tokens"]) for over in log(http)]
    assert found == [(500, "generation_failed", 2), (429, "rate_limit_exceeded", 0)]


def test_a_client_that_leaves_is_logged(
    http: httpx.Client, url: str, engine: FakeEngine, gate: Gate
) -> None:
    with posted(url, "/v1/completions", BODIES["/v1/completions"]):
        engine.at_gate.get(timeout=WAIT_SECONDS)
    engine.aborted.get(timeout=WAIT_SECONDS)
    found = until(lambda: log(http))
    assert [(over["status"], over["code"]) for over in found] == [(499, "client_left")]


def test_the_log_names_keys(tmp_path: Path) -> None:
    keys = key_file(tmp_path, alice={}, root={"role": "admin"})
    with (
        running(FakeEngine(), Settings(port=0, api_keys_file=keys)) as url,
        client_of(url, "alice") as alice,
        client_of(url, "root") as root,
    ):
        alice.post("/v1/completions", json=BODIES["/v1/completions"]).raise_for_status()
        assert alice.post(f"/admin/requests/{'0' * 32}/cancel").status_code == 403
        told = log(root)
    assert [(over["client"], over["key"]) for over in told] == [("alice", "alice")]


@contextmanager
def activity(url: str) -> Iterator[Iterator[dict[str, Any]]]:
    """The events of the stream."""
    with httpx.stream("GET", f"{url}{STREAM}", timeout=CLIENT_SECONDS) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = (line for line in answer.iter_lines() if line.startswith("data: "))
        yield (json.loads(line.removeprefix("data: ")) for line in lines)


def test_the_stream_begins_with_all_and_goes_on_with_what_is_new(
    url: str, http: httpx.Client, engine: FakeEngine
) -> None:
    document = http.get("/openapi.json").json()
    schema = {"$ref": "#/components/schemas/Activity", "components": document["components"]}
    for _ in range(3):
        http.post("/v1/completions", json=BODIES["/v1/completions"]).raise_for_status()
    with activity(url) as events:
        first = next(events)
        jsonschema.validate(first, schema)
        assert [over["number"] for over in first["finished"]] == [1, 2, 3]
        engine.script = Script(gate=(gate := Gate()), gate_after_tokens=3)
        with asking(http, "/v1/completions") as answer:
            engine.at_gate.get(timeout=WAIT_SECONDS)
            rows = next(event["requests"] for event in events if event["requests"])
            gate.open()
            answer.read()
        assert [row["output_tokens"] for row in rows] == [3]
        later = next(event for event in events if event["finished"])
        assert [over["number"] for over in later["finished"]] == [4]
        point = next(event["points"] for event in events if event["points"])
        jsonschema.validate({**later, "points": point}, schema)


def test_the_stream_lists_a_bounded_number(
    url: str, http: httpx.Client, engine: FakeEngine, gate: Gate
) -> None:
    with ExitStack() as stack:
        for _ in range(SHOWN_REQUESTS + 2):
            stack.enter_context(posted(url, "/v1/completions", BODIES["/v1/completions"]))
            engine.at_gate.get(timeout=WAIT_SECONDS)
        with activity(url) as events:
            event = next(events)
    assert (len(event["requests"]), event["hidden_requests"]) == (SHOWN_REQUESTS, 2)


def test_the_stream_of_a_dead_engine_is_a_503(http: httpx.Client, engine: FakeEngine) -> None:
    engine.script = Script(dead=True)
    assert http.get(STREAM).status_code == 503
    assert http.get("/admin/series").status_code == 200


def test_the_series_grow_while_nobody_watches(http: httpx.Client) -> None:
    series = until(lambda: http.get("/admin/series").json(), lambda found: found["points"])
    assert series["interval_seconds"] == INTERVAL_SECONDS
    assert series["points"][0]["generated_tokens_per_second"] == 0


def test_without_a_dashboard_there_is_no_stream() -> None:
    with running(FakeEngine(), Settings(port=0, dashboard=False)) as url:
        assert httpx.get(f"{url}{STREAM}").status_code == 404
        assert httpx.get(f"{url}/admin/requests/log").json() == {"requests": []}
