"""Requests on their way to an engine's process and back, without a process."""

import asyncio
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, cast

import pytest

from engine.api import EngineStopped, InvalidRequest, QueueFull
from engine.remote.connection import Connection
from engine.remote.engine import RemoteEngine, Submissions
from engine.values.output import FinishReason, OutputEvent, TokenLogprob, Usage
from engine.values.request import RefusalReason, Request
from engine.values.tokens import pack
from tests.contract.fake_engine import CARD, ByteTokenizer, FakeEngine

REQUEST = Request("r", pack((1, 2)), 9, n=2)


class FakeConnection:
    """Keeps what is sent. A test answers it."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, object]] = []
        self.cancelled: list[int] = []
        self.answer: Future[None] = Future()

    def send(self, call: Any, argument: object) -> tuple[int, Future[None]]:
        self.sent.append((call.name, argument))
        return len(self.sent), self.answer

    def cancel(self, number: int) -> None:
        self.cancelled.append(number)


class Sink:
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.events: list[OutputEvent] = []
        self.errors: list[BaseException] = []
        self.put = self.events.append
        self.fail = self.errors.append


@pytest.fixture
def connection() -> FakeConnection:
    return FakeConnection()


@pytest.fixture
async def engine(connection: FakeConnection) -> RemoteEngine:
    stats = await FakeEngine().stats()
    return RemoteEngine(cast(Connection, connection), Submissions(), CARD, ByteTokenizer(), stats)


async def turn() -> None:
    """Let what other threads have posted run."""
    for _ in range(3):
        await asyncio.sleep(0)


def last(index: int) -> OutputEvent:
    return OutputEvent("r", index, finish_reason=FinishReason.STOP, usage=Usage(2, 0, 1))


async def test_events_come_until_all_sequences_have_ended(
    engine: RemoteEngine, connection: FakeConnection
) -> None:
    sink = Sink()
    submission = engine.generate(REQUEST, sink)
    connection.answer.set_result(None)
    engine.submissions.deliver([last(0), OutputEvent("r", 1, text="a"), OutputEvent("x", 0)])
    engine.submissions.deliver([last(1)])
    await turn()
    submission.end()
    assert [event.index for event in sink.events] == [0, 1, 1]
    assert (sink.errors, connection.sent) == ([], [("submit", REQUEST)])
    assert engine.counters.counts().finished[FinishReason.STOP] == 2


async def test_what_is_ended_early_is_aborted_and_gets_nothing_more(
    engine: RemoteEngine, connection: FakeConnection
) -> None:
    sink = Sink()
    submission = engine.generate(REQUEST, sink)
    engine.submissions.deliver([last(0)])
    await turn()
    engine.submissions.deliver([OutputEvent("r", 1, text="a")])  # on its way
    submission.end()
    submission.end()
    await turn()
    assert sink.events == [last(0)]
    assert (connection.sent[1:], connection.cancelled) == ([("abort", "r")], [1])
    assert engine.counters.counts().finished[FinishReason.ABORT] == 1


@pytest.mark.parametrize(
    ("error", "reason", "n_aborts"),
    [
        (QueueFull("full", 3), RefusalReason.QUEUE_FULL, 0),
        (EngineStopped("stopped"), RefusalReason.STOPPED, 0),
        (RuntimeError("a frame was too long"), None, 1),
    ],
)
async def test_a_refusal_is_the_sinks_error(
    engine: RemoteEngine,
    connection: FakeConnection,
    error: Exception,
    reason: RefusalReason | None,
    n_aborts: int,
) -> None:
    """After an error that is none of the engine's the process may have accepted the request."""
    sink = Sink()
    submission = engine.generate(REQUEST, sink)
    connection.answer.set_exception(error)
    await turn()
    submission.end()
    assert (sink.events, sink.errors) == ([], [error])
    assert len(connection.sent) == 1 + n_aborts
    counts = engine.counters.counts()
    assert sum(counts.refused.values()) == 2 * (reason is not None)
    assert reason is None or counts.refused[reason] == 2
    assert counts.finished[FinishReason.ABORT] == 2 * n_aborts


async def test_two_requests_have_no_common_id(
    engine: RemoteEngine, connection: FakeConnection
) -> None:
    first, second = Sink(), Sink()
    running = engine.generate(REQUEST, first)
    engine.generate(REQUEST, second).end()
    assert [type(error) for error in second.errors] == [InvalidRequest]
    engine.submissions.deliver([last(0)])
    await turn()
    assert first.events == [last(0)], "the end of the other has not taken its place"
    running.end()


@pytest.mark.parametrize("is_accepted_first", [True, False])
async def test_an_engine_that_stops_fails_what_it_has_accepted(
    engine: RemoteEngine, connection: FakeConnection, is_accepted_first: bool
) -> None:
    sink = Sink()
    submission = engine.generate(REQUEST, sink)
    if is_accepted_first:
        connection.answer.set_result(None)
        engine.submissions.engine_stopped()
    else:
        engine.submissions.engine_stopped()
        await turn()
        assert not sink.errors, "it may be refused"
        connection.answer.set_result(None)
    await turn()
    submission.end()
    assert (sink.events, [type(error) for error in sink.errors]) == ([], [EngineStopped])
    assert engine.counters.counts().finished[FinishReason.ERROR] == 2
    assert len(connection.sent) == 1


@pytest.mark.parametrize("refused_first", [True, False])
async def test_a_request_with_events_was_accepted_whatever_is_lost_with_the_process(
    engine: RemoteEngine, connection: FakeConnection, *, refused_first: bool
) -> None:
    sink = Sink()
    submission = engine.generate(REQUEST, sink)
    engine.submissions.deliver([OutputEvent("r", 0, text="a")])
    ends = [
        lambda: connection.answer.set_exception(EngineStopped("the engine has stopped")),
        engine.submissions.engine_stopped,
    ]
    for end in ends if refused_first else reversed(ends):
        end()
    await turn()
    submission.end()
    assert [event.text for event in sink.events] == ["a"]
    assert [type(error) for error in sink.errors] == [EngineStopped]
    assert engine.counters.counts().finished[FinishReason.ERROR] == 2


async def test_the_prompt_s_logprobs_are_for_all_outputs_that_have_not_ended(
    engine: RemoteEngine,
) -> None:
    sink = Sink()
    engine.generate(replace(REQUEST, n=3), sink)
    ended = OutputEvent("r", 1, finish_reason=FinishReason.ERROR, usage=Usage(2, 0, 0))
    entries = (None, TokenLogprob(2, -1.0))
    engine.submissions.deliver([ended, OutputEvent("r", 0, prompt_logprobs=entries)])
    await turn()
    assert [event.index for event in sink.events] == [1, 0, 2]
    assert [event.prompt_logprobs for event in sink.events] == [(), entries, entries]
