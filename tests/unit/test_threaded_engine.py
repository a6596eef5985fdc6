"""The engine behind its thread, as the server sees it: real threads, a runner without a model."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from engine.api import EngineStopped, InvalidRequest, ModelError, NoGrammars, QueueFull
from engine.core.idle_recount import IDLE_SECONDS
from engine.core.inbox import CALLS_AT_ONCE, Inbox
from engine.core.loop import STALL_SECONDS, Deliver, EngineLoop
from engine.core.request import PreparedRequest
from engine.core.scheduler import Scheduler
from engine.core.sequence import Step
from engine.core.statistics import snapshot
from engine.core.step import RunnerLost, StepPlan, StepResult
from engine.grammar.state import GrammarPlan
from engine.remote.calls import CALLS
from engine.thread import QUICK_TOKENS, EngineParts, EngineThread
from engine.values.output import FinishReason, OutputEvent
from engine.values.request import (
    Constraint,
    Grammar,
    GrammarKind,
    RefusalReason,
    Request,
    SamplingParams,
)
from engine.values.stats import CacheTier, Latency
from engine.values.tokens import pack
from tests.hosting import ThreadAsProcess, hosted
from tests.simulation.daemon import NO_BYTES, NO_DECODE, NO_MEMORY
from tests.unit.engine_harness import VOCAB_SIZE, Harness, prompt
from tests.unit.threaded_harness import Letters, Parts, Setup, request
from tools.events import events_of

PATIENCE = 30.0


@pytest_asyncio.fixture
async def setup() -> AsyncIterator[Setup]:
    made = Setup()
    yield made
    made.runner.open()
    await made.engine.drain(0.0)


async def test_events_arrive_in_order_and_end_once(setup: Setup) -> None:
    setup.runner.open()
    events = await setup.collect(request("a", n=3))
    for index in range(3):
        own = [event for event in events if event.index == index]
        assert own[0].admission is not None
        assert own[0].admission.prompt_tokens == 10
        assert [len(event.token_ids) for event in own] == [0, 1, 1, 1, 1]
        assert [event.finish_reason for event in own] == [None] * 4 + [FinishReason.LENGTH]
    assert (await setup.engine.stats()).sequences.finished[FinishReason.LENGTH] == 3


async def test_when_nothing_is_computed_the_store_is_recounted(setup: Setup) -> None:
    setup.runner.open()
    await setup.collect(request("a"))
    assert (await setup.engine.stats()).contradictions == 0
    pool = setup.harness.store.pool
    pool.retain(pool.allocate(1))  # a reference that nobody has
    setup.now += 2 * IDLE_SECONDS
    async with asyncio.timeout(PATIENCE):
        while not (await setup.engine.stats()).contradictions:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert setup.engine.is_alive()


async def test_concurrent_requests_are_answered_each_with_its_own(setup: Setup) -> None:
    setup.runner.open()
    answers = await asyncio.gather(*(setup.collect(request(f"r{i}", 5 + i)) for i in range(12)))
    alone = Harness()
    for i, events in enumerate(answers):
        tokens = [token for event in events for token in event.token_ids]
        assert tokens == alone.output(alone.serve(prompt(1, 5 + i)))
        assert {event.request_id for event in events} == {f"r{i}"}


async def test_an_invalid_request_is_refused_to_its_sender(setup: Setup) -> None:
    with pytest.raises(InvalidRequest):
        await setup.collect(request("a", max_tokens=-1))
    assert (await setup.engine.stats()).waiting == 0


async def test_a_full_queue_is_reported() -> None:
    setup = Setup(max_waiting=1)
    first = asyncio.ensure_future(setup.collect(request("a")))
    await setup.begun()  # "a" runs
    waiting = [asyncio.ensure_future(setup.collect(request(f"w{i}"))) for i in range(2)]
    await setup.asked(2)
    setup.runner.open()
    results = await asyncio.gather(first, *waiting, return_exceptions=True)
    assert sum(isinstance(result, QueueFull) for result in results) == 1
    await setup.engine.drain(0.0)


async def test_who_was_refused_is_not_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    """An abort goes before all that others ask, and where many are refused all others wait."""
    setup = Setup(max_waiting=1)
    aborted: list[str] = []
    monkeypatch.setattr(setup.loop, "abort", aborted.append)
    first = asyncio.ensure_future(setup.collect(request("a", max_tokens=1)))
    await setup.begun()
    waiting = [asyncio.ensure_future(setup.collect(request(f"w{i}"))) for i in range(9)]
    await setup.asked(9)
    setup.runner.open()
    results = await asyncio.gather(first, *waiting, return_exceptions=True)
    assert sum(isinstance(result, QueueFull) for result in results) == 8
    assert await setup.engine.requests() == ()  # asked behind any abort
    assert aborted == []
    await setup.engine.drain(0.0)


async def test_closing_the_iterator_frees_the_blocks(setup: Setup) -> None:
    setup.runner.gate.release()
    async with aclosing(events_of(setup.engine, request("a", max_tokens=150))) as events:
        async for _ in events:
            break
    setup.runner.open()
    assert await setup.engine.requests() == ()  # asked behind the abort
    stats = await setup.engine.stats()
    assert (stats.running, stats.waiting, stats.cache.blocks_held) == (0, 0, 0)
    assert stats.sequences.finished[FinishReason.ABORT] == 1


async def test_cancelling_a_queued_request_frees_its_place(setup: Setup) -> None:
    first = asyncio.ensure_future(setup.collect(request("a", max_tokens=2)))
    await setup.begun()
    queued = asyncio.ensure_future(setup.collect(request("b")))
    await setup.asked(1)
    queued.cancel()
    setup.runner.open()
    await first
    with pytest.raises(asyncio.CancelledError):
        await queued
    assert await setup.engine.requests() == ()
    stats = await setup.engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.sequences.finished[FinishReason.ABORT] == 1  # though the loop never saw it


async def test_an_abort_overtakes_submissions_that_wait() -> None:
    """Who leaves frees blocks that the others want."""
    setup = Setup(max_waiting=8 * CALLS_AT_ONCE)
    left = asyncio.ensure_future(setup.collect(request("left", max_tokens=150)))
    await setup.begun()
    others = [
        asyncio.ensure_future(setup.collect(request(f"r{i}", n_tokens=3, max_tokens=1)))
        for i in range(3 * CALLS_AT_ONCE)
    ]
    await setup.asked(3 * CALLS_AT_ONCE)
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    await setup.asked(3 * CALLS_AT_ONCE + 1)
    await setup.step()
    await setup.step()
    live = {sequence.request.id for sequence in setup.harness.scheduler.waiting}
    live |= {sequence.request.id for sequence in setup.harness.scheduler.running}
    assert "left" not in live
    assert f"r{3 * CALLS_AT_ONCE - 1}" not in live  # it has still not been taken in
    setup.runner.open()
    await asyncio.gather(*others)
    await setup.engine.drain(0.0)


@pytest.mark.parametrize("field", ["prompt", "prediction"])
async def test_what_a_client_makes_long_is_prepared_on_another_thread(
    field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers, prepare_request = set[str](), Scheduler.prepare

    def prepare(self: Scheduler, request: Request, plan: GrammarPlan | None) -> PreparedRequest:
        readers.add(threading.current_thread().name)
        return prepare_request(self, request, plan)

    monkeypatch.setattr(Scheduler, "prepare", prepare)
    engine = await asyncio.to_thread(EngineThread, Parts().build, print, lambda: None)
    long: dict[str, Any] = {field: pack([1] * (QUICK_TOKENS + 1))}
    with pytest.raises(InvalidRequest, match="context"):
        await engine.submit(replace(request("long"), **long))
    assert readers
    assert readers.isdisjoint({"engine", threading.current_thread().name})
    await engine.drain(0.0)


async def test_clear_and_probe_go_through_the_inbox(setup: Setup) -> None:
    setup.runner.open()
    await setup.collect(request("a", max_tokens=1))
    probed = await setup.engine.probe(pack(prompt(1, 10)), "", "")
    assert probed.cached_tokens == 9
    assert len(probed.block_digests) == 2
    assert (await setup.engine.probe(pack(prompt(1, 10)), "other salt", "")).cached_tokens == 0
    cleared = await setup.engine.clear_cache()
    assert (cleared.blocks, cleared.bytes) == (3, 3 * 32)
    assert (await setup.engine.stats()).cache.blocks_free == 64
    assert (await setup.engine.probe(pack(prompt(1, 10)), "", "")).cached_tokens == 0


async def test_live_requests_are_listed(setup: Setup) -> None:
    task = asyncio.ensure_future(setup.collect(request("a")))
    await setup.begun()
    listed = asyncio.ensure_future(setup.engine.requests())
    await setup.asked(1)
    setup.runner.gate.release()
    infos = await listed
    assert [(info.request_id, info.waits_for, info.computed_tokens) for info in infos] == [
        ("a", None, 10)
    ]
    setup.runner.open()
    await task
    assert await setup.engine.requests() == ()


async def test_statistics_do_not_wait_for_the_step(setup: Setup) -> None:
    task = asyncio.ensure_future(setup.collect(request("a", n=2)))
    await setup.begun()
    stats = await setup.engine.stats()  # while the first one's prompt is computed
    assert (stats.running, stats.waiting, stats.steps) == (1, 1, 0)
    assert stats.cache.blocks_held > 0
    assert stats.sequences.received == 2
    setup.runner.open()
    await task


async def test_a_step_without_end_counts_as_dead(setup: Setup) -> None:
    task = asyncio.ensure_future(setup.collect(request("a")))
    await setup.begun()
    setup.now = STALL_SECONDS
    assert setup.engine.is_alive()
    setup.now += 1.0
    await until(lambda: not setup.engine.is_alive())
    assert (await setup.engine.stats()).running == 1
    setup.runner.open()
    await task
    await until(setup.engine.is_alive)


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def test_what_an_event_tells_of_is_in_the_statistics() -> None:
    """Who has its last token and asks then must not find it running."""
    harness, seen = Harness(), list[tuple[int, int]]()

    def deliver(events: list[OutputEvent]) -> None:
        for event in events:
            stats = snapshot(loop.scheduler, loop.sizes, NO_MEMORY, NO_DECODE)
            seen.append((stats.generated_tokens, stats.running))
            assert bool(event.admission) == (len(seen) == 1)

    loop = EngineLoop(harness.scheduler, harness.runner, Inbox(), deliver, NO_BYTES)
    harness.scheduler.add(harness.scheduler.prepare(request("a", max_tokens=3)), 0.0)
    while harness.scheduler.has_work:
        loop.turn()
    assert seen == [(0, 1), (1, 1), (2, 1), (3, 0)]


def test_events_are_delivered_before_the_next_step_is_launched_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Launching waits for the device: who waits for a token must not wait with it."""
    harness, happened = Harness(), list[str]()
    launch = harness.runner.launch

    def note_and_launch() -> None:
        happened.append("launch")
        launch()

    def deliver(events: list[OutputEvent]) -> None:
        happened.extend("token" for event in events if event.token_ids)

    monkeypatch.setattr(harness.runner, "launch", note_and_launch)
    loop = EngineLoop(harness.scheduler, harness.runner, Inbox(), deliver, NO_BYTES)
    harness.scheduler.add(harness.scheduler.prepare(request("a", max_tokens=3)), 0.0)
    while harness.scheduler.has_work:
        loop.turn()
    assert happened == ["launch", "token", "launch", "token", "launch", "token"]


def test_what_a_clear_of_the_disk_has_changed_is_in_the_statistics() -> None:
    harness = Harness()
    loop = EngineLoop(harness.scheduler, harness.runner, Inbox(), print, NO_BYTES)
    held = harness.pool.allocate(3)
    loop.clear(tiers=[CacheTier.MEMORY])
    assert snapshot(loop.scheduler, loop.sizes, NO_MEMORY, NO_DECODE).cache.blocks_held == 3
    harness.pool.release(held)  # as when a load is given up
    loop.clear(tiers=[CacheTier.DISK])
    assert snapshot(loop.scheduler, loop.sizes, NO_MEMORY, NO_DECODE).cache.blocks_held == 0


async def test_drain_lets_running_requests_finish_and_refuses_new_ones() -> None:
    setup = Setup()
    running = asyncio.ensure_future(setup.collect(request("a")))
    await setup.begun()
    drained = asyncio.ensure_future(setup.engine.drain(60.0))
    await setup.asked(1)
    with pytest.raises(EngineStopped):
        await setup.collect(request("b"))
    setup.runner.open()
    assert (await running)[-1].finish_reason is FinishReason.LENGTH
    await drained
    assert not setup.engine.is_alive()
    with pytest.raises(EngineStopped):
        await setup.engine.requests()
    stats = await setup.engine.stats()
    assert (stats.generated_tokens, stats.latencies[Latency.REQUEST].count) == (4, 1)
    assert stats.sequences.received == 2
    assert stats.sequences.refused[RefusalReason.STOPPED] == 1


async def test_drain_aborts_what_does_not_finish_in_time() -> None:
    setup = Setup()
    running = asyncio.ensure_future(setup.collect(request("a", max_tokens=150)))
    await setup.begun()
    drained = asyncio.ensure_future(setup.engine.drain(0.0))
    await setup.asked(2)
    setup.runner.open()
    await drained
    assert (await running)[-1].finish_reason in {FinishReason.ABORT, FinishReason.LENGTH}
    await setup.engine.drain(0.0)  # a second time does no harm


async def test_a_drain_beside_a_step_that_hangs_says_so_and_can_be_given_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    setup = Setup()
    running = asyncio.ensure_future(setup.collect(request("a")))
    await setup.begun()
    drained = asyncio.ensure_future(setup.engine.drain(0.0))
    async with asyncio.timeout(PATIENCE):
        while "aborting the remaining requests" not in caplog.text:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    drained.cancel()
    with pytest.raises(asyncio.CancelledError):
        await drained
    setup.runner.open()
    await running
    await setup.engine.drain(0.0)
    assert not setup.engine.is_alive()


async def test_a_dead_loop_leaves_nobody_hanging(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup()
    assert setup.engine.is_alive()
    victim = asyncio.ensure_future(setup.collect(request("a")))
    await setup.begun()

    def broken(*_: object) -> None:
        raise AssertionError("a fault in the scheduler itself")

    monkeypatch.setattr(setup.harness.scheduler, "commit", broken)
    setup.runner.open()
    with pytest.raises(EngineStopped):
        await victim
    assert not setup.engine.is_alive()
    with pytest.raises(EngineStopped):
        await setup.collect(request("b"))
    sequences = (await setup.engine.stats()).sequences
    assert sequences.received == 2
    assert sequences.finished[FinishReason.ERROR] == 1
    assert sequences.refused[RefusalReason.STOPPED] == 1


async def test_who_ended_in_the_fatal_step_is_not_left_hanging_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setup = Setup()
    victim = asyncio.ensure_future(setup.collect(request("a", max_tokens=1)))
    await setup.begun()
    commit = setup.harness.scheduler.commit

    def broken(step: Step, result: StepResult) -> None:
        commit(step, result)
        assert not setup.harness.scheduler.has_work
        raise AssertionError("a fault behind the last row")

    monkeypatch.setattr(setup.harness.scheduler, "commit", broken)
    setup.runner.open()
    with pytest.raises(EngineStopped):
        await victim


async def test_a_drain_does_not_wait_for_a_loop_that_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup()
    victim = asyncio.ensure_future(setup.collect(request("a")))
    await setup.begun()
    drained = asyncio.ensure_future(setup.engine.drain(1e6))
    await setup.asked(1)

    def lost() -> StepResult:
        raise RunnerLost("the device is gone")

    monkeypatch.setattr(setup.harness.runner, "collect", lost)
    setup.runner.open()
    await drained
    with pytest.raises(EngineStopped):
        await victim


async def test_a_drain_ends_although_the_device_cannot_be_released() -> None:
    parts = Parts()

    def build(inbox: Inbox, deliver: Deliver) -> EngineParts:
        return replace(parts.build(inbox, deliver), release_thread=lost)

    def lost() -> None:
        raise RuntimeError("the device is gone")

    thread = EngineThread(build, deliver=lambda events: None, ended=lambda: None)
    async with asyncio.timeout(PATIENCE):
        await thread.drain(0.0)


async def test_an_id_in_use_harms_nobody(setup: Setup) -> None:
    first = asyncio.ensure_future(setup.collect(request("a")))
    await setup.begun()
    with pytest.raises(InvalidRequest, match="id a"):
        await setup.collect(request("a"))
    setup.runner.open()
    assert (await first)[-1].finish_reason is FinishReason.LENGTH


def test_a_step_is_timed_from_its_own_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not from when the loop fell asleep before it: that would look like a hung step."""
    clock, started = [0.0], []
    harness = Harness(clock=lambda: clock[0])
    inbox = Inbox()

    def watched(plan: StepPlan) -> None:
        started.append(loop.step_started_seconds)
        submit(plan)

    submit = harness.runner.submit
    monkeypatch.setattr(harness.runner, "submit", watched)
    loop = EngineLoop(harness.scheduler, harness.runner, inbox, lambda events: None, NO_BYTES)
    assert loop.step_started_seconds is None

    def arrive() -> None:
        clock[0] = 900.0
        harness.scheduler.add(harness.scheduler.prepare(request("a")), 900.0)

    inbox.post(arrive)
    loop.turn()
    assert started == [900.0]
    assert loop.step_started_seconds is None


async def test_what_building_raises_reaches_whoever_starts_the_engine() -> None:
    def build(inbox: Inbox, deliver: Deliver) -> EngineParts:
        raise ModelError("no such model")

    with pytest.raises(ModelError, match="no such model"):
        hosted(build, Letters())


def test_a_step_that_raises_leaves_the_loop_turning() -> None:
    harness = Harness()
    events: list[OutputEvent] = []

    def fail() -> None:
        raise RuntimeError("out of memory")

    inbox = Inbox()
    loop = EngineLoop(harness.scheduler, harness.runner, inbox, events.extend, NO_BYTES)
    harness.fault = fail
    harness.scheduler.add(harness.scheduler.prepare(request("a")), 0.0)
    loop.turn()
    harness.fault = lambda: None
    assert events[-1].error == "the step failed: RuntimeError: out of memory"
    harness.scheduler.add(harness.scheduler.prepare(request("b")), 0.0)
    while harness.scheduler.has_work:
        loop.turn()
    assert events[-1].finish_reason is FinishReason.LENGTH


async def test_hits_of_the_last_minutes_are_told_as_of_now() -> None:
    setup = Setup()
    setup.runner.open()
    setup.now = 2000.0
    await setup.collect(request("cold"))
    setup.now = 2100.0
    await setup.collect(request("warm"))

    async def told() -> list[tuple[int, int]]:
        recent = (await setup.engine.stats()).cache.recent_hits
        return [(hits.queried_tokens, hits.hit_tokens) for hits in recent]

    assert await told() == [(10, 9), (20, 9), (20, 9)]
    setup.now = 2400.5
    assert await told() == [(0, 0), (0, 0), (20, 9)]
    await setup.engine.drain(1.0)


async def test_where_no_grammar_can_be_read_what_may_do_without_one_is_served(setup: Setup) -> None:
    setup.runner.open()
    calls = Constraint(Grammar(GrammarKind.REGEX, "a"), "tools", behind=(1,), weaker=(None,))
    events = await setup.collect(replace(request("free"), constraint=calls))
    assert events[-1].finish_reason is FinishReason.LENGTH
    with pytest.raises(NoGrammars):
        await setup.collect(replace(request("held"), constraint=replace(calls, weaker=())))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": pack((VOCAB_SIZE,))}, "prompt"),
        ({"prompt": pack(())}, "prompt"),
        ({"max_tokens": 10_000}, "max_tokens"),
        ({"sampling": SamplingParams(logit_bias={VOCAB_SIZE: 1.0})}, "logit_bias"),
        ({"adapter": "unknown"}, "model"),
    ],
)
async def test_a_request_that_cannot_be_served_is_refused_before_its_grammar_is_tried(
    setup: Setup, fields: dict[str, Any], param: str
) -> None:
    """No worker of this engine can try one."""
    guided = Constraint(Grammar(GrammarKind.REGEX, "a"), "guided_regex")
    with pytest.raises(InvalidRequest) as refused:
        await setup.collect(replace(request("a"), constraint=guided, **fields))
    assert refused.value.param == param


def test_a_hosted_engine_can_be_killed_when_its_server_has_closed() -> None:
    """As a process can. macOS refuses to shut down a socket whose other end is closed."""
    ours, theirs = socket.socketpair()
    engine = ThreadAsProcess(
        theirs, lambda config, report, *rest: EngineThread(Parts().build, *rest)
    )
    ours.close()
    assert engine.wait(PATIENCE) == 0
    engine.kill()


async def test_a_request_whose_acceptance_cannot_be_read_is_aborted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine has taken it, and would compute it for nobody."""
    setup = Setup()
    aborted: list[str] = []
    monkeypatch.setattr(setup.loop, "abort", aborted.append)

    def unread(json: bytes) -> object:
        raise ValueError("not JSON")

    monkeypatch.setattr(CALLS["submit"].result, "validate_json", unread)
    with pytest.raises(ValueError, match="not JSON"):
        await setup.collect(request("a", max_tokens=1))
    setup.runner.open()
    await setup.engine.requests()  # asked after the abort
    assert aborted == ["a"]
