"""Events on their way from the engine to the answer."""

import asyncio
import random
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import cast

import pytest
from anyio import current_time, move_on_after, sleep_forever
from starlette.types import Message

from engine.api import Engine, EventSink, Submission
from engine.values.output import FinishReason, OutputEvent, TokenLogprob, Usage
from engine.values.request import Request
from engine.values.tokens import pack
from server.activity import RequestTracker
from server.dialects.job import Job, StreamWriter, write_stream
from server.errors import ApiError, ClientDisconnected
from server.fairness import Budget, Reservation
from server.generation.choice import AnswerUsage, Choice, Step
from server.generation.history import Replays
from server.generation.progress import ProgressBody
from server.generation.requests import ServedModel
from server.generation.stream import (
    CONTINUED_AT_ONCE,
    ENTRIES_AT_ONCE,
    NO_ORDER,
    REQUESTS_AT_ONCE,
    Inbox,
    generating,
    queued_bytes,
)
from server.http.stream import EVENT_STREAM, DeferredStream, client_waiting
from server.record import Principal, RequestRecord
from server.service import RequestContext
from tests.contract.fake_engine import FakeEngine

EVENT = OutputEvent("r", 0, text="word")
LAST = OutputEvent("r", 0, finish_reason=FinishReason.STOP, usage=Usage(1, 0, 1))
EVENT_BYTES = queued_bytes(EVENT)
PATIENCE = 10.0


class Endless(FakeEngine):
    """An engine that always has the next event ready, whatever else happens."""

    async def events(self, request: Request) -> AsyncGenerator[OutputEvent, None]:
        loop = asyncio.get_running_loop()
        try:
            while True:
                ready = loop.create_future()
                loop.call_soon(ready.set_result, None)
                await ready
                yield replace(EVENT, request_id=request.id)
        finally:
            self.aborted.put(request.id)

    async def next_aborted(self) -> str:
        """The id of the next request that has been aborted."""
        return await asyncio.to_thread(self.aborted.get, timeout=PATIENCE)


@contextmanager
def reserved(max_bytes: int = 10**9) -> Iterator[Reservation]:
    """Memory for an answer that nobody else needs."""

    def too_large() -> ApiError:
        return ApiError(400, f"More than {max_bytes} bytes")

    budget = Budget(max_bytes, 10**9, too_large=too_large, too_much=too_large)
    with budget.reserve("client", lambda error: None) as reservation:
        yield reservation


async def nothing_comes() -> Message:
    await sleep_forever()
    raise AssertionError("it was cancelled")


async def refuse(message: Message) -> None:
    raise AssertionError(f"nothing is to be sent, and {message} was")


class SilentWriter(StreamWriter):
    """Sends nothing."""

    media_type = "text/plain"

    def write(self, choice: int, steps: Sequence[Step]) -> bytes:
        return b""

    def progress(self, body: ProgressBody) -> bytes:
        return b""

    def keep_alive(self) -> bytes:
        return b""

    def failure(self, error: ApiError) -> bytes:
        return b""

    def end(self, usage: AnswerUsage) -> bytes:
        return b""


def render(choices: Sequence[Choice], usage: AnswerUsage) -> bytes:
    raise AssertionError("it is streamed")


def endless_job(engine: Endless, n_requests: int) -> Job:
    """A job whose events never end."""
    replays = Replays()
    model = cast(ServedModel, SimpleNamespace(engine=engine, replays=replays))
    requests = [Request(f"r{i}", pack((1,)), 1) for i in range(n_requests)]
    return Job(model=model, requests=requests, render=render, writer=lambda choices: SilentWriter())


async def test_a_client_that_leaves_in_the_midst_of_events_is_just_gone() -> None:
    engine, left = Endless(), asyncio.Event()
    record = RequestRecord("r", Principal("client"))
    requests = [Request(f"r{i}", pack((1,)), 1) for i in range(8)]

    async def receive() -> Message:
        await left.wait()
        return {"type": "http.disconnect"}

    async def read_until_left() -> None:
        with reserved() as output:
            async with client_waiting(receive):
                with generating(engine, requests, output, record, RequestTracker()) as inbox:
                    async for _ in inbox:
                        left.set()

    with pytest.raises(ClientDisconnected):
        await read_until_left()
    assert {await engine.next_aborted() for _ in requests} == {r.id for r in requests}


async def test_at_the_deadline_an_error_takes_the_place_of_events_that_never_end() -> None:
    engine = Endless()
    job = endless_job(engine, 3)
    record = RequestRecord("r", Principal("client"), deadline=current_time() + 0.1)
    service = SimpleNamespace(tracker=RequestTracker())
    context = cast(RequestContext, SimpleNamespace(record=record, service=service))
    fill = partial(write_stream, job=job, context=context)
    stream = DeferredStream(EVENT_STREAM, fill, keepalive_seconds=3600)
    with reserved() as record.output, pytest.raises(ApiError) as caught:
        await stream({"state": {"record": record}}, nothing_comes, refuse)
    assert (caught.value.status, caught.value.code) == (504, "request_timeout")
    aborted = {await engine.next_aborted() for _ in job.requests}
    assert aborted == {request.id for request in job.requests}


class PassiveEngine:
    """An engine of which a test gives the events itself."""

    def __init__(self) -> None:
        self.submitted: list[str] = []
        self.ended: list[str] = []

    def generate(self, request: Request, sink: EventSink) -> Submission:
        self.submitted.append(request.id)
        return cast(Submission, SimpleNamespace(end=lambda: self.ended.append(request.id)))


@contextmanager
def passive_inbox(
    output: Reservation,
    n_requests: int = 1,
    engine: PassiveEngine | None = None,
    after: Mapping[str, str] = NO_ORDER,
) -> Iterator[Inbox]:
    ids = ["r", *(f"r{i}" for i in range(1, n_requests))]
    requests = [Request(id, pack((1,)), 1) for id in ids]
    inbox = Inbox(cast(Engine, engine or PassiveEngine()), requests, output, after)
    with inbox.submitted(lambda event: None):
        yield inbox


async def test_only_a_backlog_counts() -> None:
    with reserved(2 * EVENT_BYTES) as output, passive_inbox(output) as inbox:
        for _ in range(10):
            inbox.put(EVENT)
            assert output.n_bytes == 0
            await anext(inbox)
        for _ in range(3):
            inbox.put(EVENT)
        assert output.n_bytes == 2 * EVENT_BYTES
        assert await anext(inbox) == {0: [EVENT] * 3}
        assert output.n_bytes == 0
        for _ in range(4):
            inbox.put(EVENT)
        assert output.is_evicted
        assert await anext(inbox) == {0: [EVENT] * 4}


async def test_what_is_rendered_at_once_is_bounded_by_its_log_probabilities() -> None:
    """A client that reads late has all of a scored prompt waiting for it."""
    scored = replace(EVENT, prompt_logprobs=(TokenLogprob(1, -1.0, ()),) * (ENTRIES_AT_ONCE // 2))
    with reserved() as output, passive_inbox(output) as inbox:
        for _ in range(5):
            inbox.put(scored)
        inbox.put(LAST)
        batches = [batch async for batch in inbox]
    assert batches == [{0: [scored] * 2}, {0: [scored] * 2}, {0: [scored, LAST]}]


async def test_a_failure_comes_after_the_events_that_wait() -> None:
    with reserved() as output, passive_inbox(output) as inbox:
        inbox.put(EVENT)
        inbox.fail(ValueError("the engine broke"))
        assert await anext(inbox) == {0: [EVENT]}
        with pytest.raises(ValueError, match="the engine broke"):
            await anext(inbox)


async def test_waiting_in_vain_loses_no_event() -> None:
    with reserved() as output, passive_inbox(output) as inbox:
        with move_on_after(0):
            await anext(inbox)
        inbox.put(EVENT)
        inbox.put(LAST)
        assert [batch async for batch in inbox] == [{0: [EVENT, LAST]}]


async def test_the_engine_has_some_of_many_requests_at_a_time() -> None:
    engine, n_requests = PassiveEngine(), REQUESTS_AT_ONCE + 2
    with reserved() as output:
        with passive_inbox(output, n_requests, engine) as inbox:
            assert len(engine.submitted) == REQUESTS_AT_ONCE
            inbox.put(LAST)
            assert await anext(inbox) == {0: [LAST]}
            assert (engine.ended, len(engine.submitted)) == (["r"], REQUESTS_AT_ONCE + 1)
        assert sorted(engine.ended) == sorted(engine.submitted)
        assert len(engine.submitted) == REQUESTS_AT_ONCE + 1, "nothing is submitted at the end"


@pytest.mark.parametrize("seed", range(5))
async def test_a_request_begins_next_when_the_one_that_it_continues_has_ended(seed: int) -> None:
    """In trees of any shape, whose requests end in any order."""
    generator, n_requests = random.Random(seed), 150
    ids = ["r", *(f"r{i}" for i in range(1, n_requests))]
    after = {
        id: ids[generator.randrange(at)]
        for at, id in enumerate(ids)
        if at and generator.random() < 0.6
    }
    engine = PassiveEngine()
    with reserved() as output, passive_inbox(output, n_requests, engine, after) as inbox:
        while running := [id for id in engine.submitted if id not in engine.ended]:
            assert len(running) <= CONTINUED_AT_ONCE
            ended, n_before = generator.choice(running), len(engine.submitted)
            inbox.put(replace(LAST, request_id=ended))
            await anext(inbox)
            begun = engine.submitted[n_before:]
            assert all(after.get(id, ended) in engine.ended for id in begun)
            continuing = [id for id in ids if after.get(id) == ended]
            assert begun[: len(continuing)] == continuing[: len(begun)]
        assert sorted(engine.submitted) == sorted(engine.ended) == sorted(ids)
