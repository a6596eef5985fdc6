"""What is kept of requests while they are answered and when that is over."""

import asyncio
from typing import Any

import pytest

from engine.api import QueueFull
from engine.values.output import FinishReason, OutputEvent, Usage
from engine.values.request import Request
from engine.values.tokens import pack
from server.activity import KEPT, KEPT_REFUSED, RequestTracker, TrackedRequest, agent_name
from server.errors import ApiError, ended_by_admin
from server.record import Principal, RequestRecord


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tracker(clock: Clock) -> RequestTracker:
    return RequestTracker(clock, lambda: 1e9 + clock.now)


def record(id: str = "r", **fields: Any) -> RequestRecord:
    return RequestRecord(id, Principal("alice", "alice"), path="/v1/completions", **fields)


def token(index: int = 0, n_tokens: int = 1, *, ends: bool = False) -> OutputEvent:
    reason = FinishReason.STOP if ends else None
    usage = Usage(10, 0, n_tokens, accepted_draft_tokens=n_tokens - 1) if ends else None
    return OutputEvent("r", index, token_ids=(7,) * n_tokens, finish_reason=reason, usage=usage)


def admission(index: int = 0, cached_tokens: int = 0) -> OutputEvent:
    return OutputEvent("r", index, admission=Usage(10, cached_tokens, 0))


def prompts(n: int = 1, count: int = 1) -> list[Request]:
    return [Request(f"r-{i}", pack(range(10)), 100, n=n) for i in range(count)]


def serve(tracker: RequestTracker, id: str = "r") -> None:
    with tracker.answering(record(id), prompts()) as tracked:
        tracked.note(admission())
        tracked.note(token(ends=True))


def test_a_request_is_live_until_it_is_over(tracker: RequestTracker, clock: Clock) -> None:
    with tracker.answering(record(), prompts()) as tracked:
        assert list(tracker.live) == [tracked]
        assert tracker.finished() == []
        clock.now += 1
        tracked.note(admission(cached_tokens=6))
        clock.now += 1
        tracked.note(token())
        clock.now += 4
        tracked.note(token(n_tokens=5))
        tracked.note(token(n_tokens=3, ends=True))
        clock.now += 10  # for which the client reads
    assert not tracker.live
    (over,) = tracker.finished()
    assert over.model_dump() == {
        "id": "r",
        "route": "/v1/completions",
        "model": "",
        "client": "alice",
        "key": "alice",
        "agent": None,
        "sequences": 1,
        "prompt_tokens": 10,
        "cached_tokens": 6,
        "output_tokens": 9,
        "accepted_draft_tokens": 2,
        "first_token_seconds": 2.0,
        "tokens_per_second": 2.0,
        "number": 1,
        "time": 1e9 + 116,
        "seconds": 16.0,
        "status": 200,
        "code": None,
    }


def test_outputs_of_one_prompt_count_it_once(tracker: RequestTracker) -> None:
    asked = record()
    with tracker.answering(asked, prompts(n=3, count=2)) as tracked:
        for _ in range(2):
            for index in range(3):
                tracked.note(admission(index, cached_tokens=4))
                tracked.note(token(index, ends=True))
        assert tracked.unfinished == 0
    (over,) = tracker.finished()
    assert (over.sequences, over.prompt_tokens, over.cached_tokens) == (6, 20, 8)
    assert over.output_tokens == 6
    assert asked.tokens == 2 * 10 + 6, "what limits of tokens count"


def test_without_tokens_there_is_no_speed(tracker: RequestTracker, clock: Clock) -> None:
    with tracker.answering(record(), prompts()) as tracked:
        assert speed(tracked) == (None, None)
        clock.now += 3
        tracked.note(token())
        assert speed(tracked) == (3.0, None)
        tracked.note(token())
        assert speed(tracked) == (3.0, None), "no time has passed"
        clock.now += 0.5
        assert speed(tracked) == (3.0, 2.0)


def speed(tracked: TrackedRequest) -> tuple[float | None, float | None]:
    return tracked.first_token_seconds, tracked.tokens_per_second


def test_the_log_is_bounded_and_numbered(tracker: RequestTracker) -> None:
    for number in range(KEPT + 5):
        serve(tracker, str(number))
    finished = tracker.finished()
    assert [one.number for one in finished] == list(range(KEPT + 5, 5, -1))
    assert [one.number for one in tracker.finished(after=KEPT + 3)] == [KEPT + 5, KEPT + 4]
    assert tracker.finished(after=KEPT + 5) == []


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ApiError(400, "no", code="grammar_failed"), 400, "grammar_failed"),
        (QueueFull("full", 3), 429, "rate_limit_exceeded"),
        (ZeroDivisionError(), 500, "internal_error"),
    ],
)
async def test_what_went_wrong_is_logged(
    tracker: RequestTracker, error: Exception, status: int, code: str
) -> None:
    with pytest.raises(type(error)), tracker.answering(record(), prompts()):
        raise error
    (over,) = tracker.finished()
    assert (over.status, over.code) == (status, code)
    assert tracker.live == ()


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({"ended": (503, "overloaded")}, 503, "overloaded"),
        ({"client_left": True}, 499, "client_left"),
        ({"deadline": 100.0}, 504, "request_timeout"),
        ({}, 499, "cancelled"),
    ],
)
async def test_who_has_cancelled_it_is_logged(
    tracker: RequestTracker, fields: dict[str, Any], status: int, code: str
) -> None:
    with (
        pytest.raises(asyncio.CancelledError),
        tracker.answering(record(**fields), prompts()),
    ):
        raise asyncio.CancelledError
    (over,) = tracker.finished()
    assert (over.status, over.code) == (status, code)


async def test_a_request_is_ended_by_its_id_alone(tracker: RequestTracker) -> None:
    ended: list[ApiError] = []
    other: list[ApiError] = []
    with (
        tracker.answering(record("a", on_end=ended.append), prompts()),
        tracker.answering(record("b", on_end=other.append), prompts()),
    ):
        assert tracker.end("a", ended_by_admin())
        assert not tracker.end("c", ended_by_admin())
    assert [(error.status, error.code) for error in ended] == [(410, "ended_by_admin")]
    assert other == []
    assert not tracker.end("a", ended_by_admin()), "it is over"


def test_who_was_refused_is_in_the_log_and_pushes_nobody_out(tracker: RequestTracker) -> None:
    serve(tracker, "first")
    for i in range(KEPT_REFUSED + 10):
        refused = record(f"refused-{i}", user_agent="codex_exec/0.46.0 (Debian)")
        refused.status, refused.error_code = 503, "model_failed"
        tracker.note_refused(refused, seconds=2.0)
    serve(tracker, "last")
    last, *refusals, first = tracker.finished()
    assert (last.id, first.id, len(refusals)) == ("last", "first", KEPT_REFUSED)
    assert (refusals[0].id, refusals[0].status, refusals[0].code) == (
        f"refused-{KEPT_REFUSED + 9}",
        503,
        "model_failed",
    )
    assert (refusals[0].agent, refusals[0].seconds, refusals[0].sequences) == ("Codex", 2.0, 0)
    assert tracker.finished(after=last.number - 1) == [last]


async def test_who_was_answered_is_logged_once(tracker: RequestTracker) -> None:
    answered = record()
    with pytest.raises(QueueFull), tracker.answering(answered, prompts()):
        raise QueueFull("full", 1)
    answered.status = 503
    tracker.note_refused(answered, seconds=1.0)
    fine = record("fine")
    fine.status = 200
    tracker.note_refused(fine, seconds=1.0)
    assert len(tracker.finished()) == 1


@pytest.mark.parametrize(
    ("user_agent", "name"),
    [
        ("claude-cli/2.0.14 (external, cli)", "Claude Code"),
        ("codex_cli_rs/0.46.0 (Ubuntu 22.4.0; x86_64) xterm-256color", "Codex"),
        ("opencode/1.0.0 ai-sdk/provider-utils/3.0", "OpenCode"),
        ("QwenCode/0.14.1 (linux; x64)", "Qwen Code"),
        ("Mozilla/5.0 (X11; Linux x86_64)", "a browser"),
        ("OpenAI/Python 1.99.0", "OpenAI/Python"),
        ("python-httpx/0.28.1", "python-httpx"),
        ("curl/8.5.0", "curl"),
        ("", None),
        ("<script>alert(1)</script>", None),
        ("name\x1b[2J\n/1", "name"),
        ("a" * 500, "a" * 32),
    ],
)
def test_an_agent_is_named_by_its_header(user_agent: str, name: str | None) -> None:
    assert agent_name(user_agent) == name
