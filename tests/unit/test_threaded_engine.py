"""The engine behind its thread, as the server sees it: real threads, a runner without a model."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

import pytest
import pytest_asyncio

from engine.api import EngineStopped, InvalidRequest, QueueFull
from engine.groups import StorageBytes
from engine.inbox import Inbox
from engine.loop import Deliver, EngineLoop
from engine.runner import RunnerLost
from engine.step import StepPlan, StepResult
from engine.threaded import EngineParts, ThreadedEngine
from engine.timing import Timing
from engine.types import FinishReason, ModelCard, OutputEvent, Request, SamplingParams
from tests.simulation.simulator import LetterDetokenizer, SilentTelemetry
from tests.unit.engine_harness import VOCAB_SIZE, Harness, prompt

CARD = ModelCard(
    name="hashes",
    fingerprint="fp",
    vocab_size=VOCAB_SIZE,
    max_context_tokens=200,
    eos_token_ids=frozenset(),
    kv_bytes_per_token=8,
    arena_tokens=252,
    block_size=4,
    device="none",
    dtype="int",
    blas="",
)


class Letters:
    """A tokenizer for tokens that are letters."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [ord(character) - ord("a") for character in text]

    def decode(self, token_ids: object) -> str:
        return ""

    def token_bytes(self, token_id: int) -> bytes:
        return LetterDetokenizer().add(token_id).encode()

    def apply_chat_template(self, messages: object, **template_arguments: object) -> list[int]:
        return [1]


class GatedRunner:
    """Computes a step only when it is let through. `begun` is set while one waits."""

    def __init__(self, harness: Harness) -> None:
        self._harness = harness
        self.gate = threading.Semaphore(0)
        self.begun = threading.Event()
        self.steps = 0

    def run(self, plan: StepPlan) -> StepResult:
        self.begun.set()
        self.gate.acquire()
        self.begun.clear()
        self.steps += 1
        return self._harness.runner.run(plan)

    def open(self) -> None:
        for _ in range(100_000):
            self.gate.release()


class Setup:
    """An engine on the hash model, with handles to what is inside."""

    def __init__(self, **limits: int) -> None:
        self.harness = Harness(**limits)  # type: ignore[arg-type]
        self.runner = GatedRunner(self.harness)
        self.engine = ThreadedEngine.start(self._build)

    def _build(self, inbox: Inbox, deliver: Deliver) -> EngineParts:
        timing = Timing(lambda: 0.0, SilentTelemetry())
        loop = EngineLoop(self.harness.scheduler, self.runner, inbox, deliver, timing)
        sizes = StorageBytes(block=32, slots=(), arenas=2016)
        return EngineParts(loop, CARD, Letters(), sizes, release_thread=lambda: None)

    async def collect(self, request: Request) -> list[OutputEvent]:
        return [event async for event in self.engine.generate(request)]

    async def begun(self) -> None:
        """A step waits in the runner."""
        await asyncio.to_thread(self.runner.begun.wait)


def request(name: str, n_tokens: int = 10, max_tokens: int = 4, n: int = 1) -> Request:
    return Request(name, tuple(prompt(1, n_tokens)), max_tokens, SamplingParams(seed=3), n=n)


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
        assert [event.finish_reason for event in own] == [None] * 3 + [FinishReason.LENGTH]
    assert (await setup.engine.stats()).finished[FinishReason.LENGTH] == 3


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
    setup.runner.open()
    results = await asyncio.gather(first, *waiting, return_exceptions=True)
    assert sum(isinstance(result, QueueFull) for result in results) == 1
    await setup.engine.drain(0.0)


async def test_closing_the_iterator_frees_the_blocks(setup: Setup) -> None:
    setup.runner.gate.release()
    async with aclosing(setup.engine.generate(request("a", max_tokens=150))) as events:
        async for _ in events:
            break
    setup.runner.open()
    stats = await setup.engine.stats()
    assert (stats.running, stats.waiting, stats.cache.blocks_held) == (0, 0, 0)
    assert stats.finished[FinishReason.ABORT] == 1


async def test_cancelling_a_queued_request_frees_its_place(setup: Setup) -> None:
    first = asyncio.ensure_future(setup.collect(request("a", max_tokens=2)))
    await setup.begun()
    queued = asyncio.ensure_future(setup.collect(request("b")))
    await asyncio.sleep(0)
    queued.cancel()
    setup.runner.open()
    await first
    with pytest.raises(asyncio.CancelledError):
        await queued
    stats = await setup.engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)


async def test_clear_and_probe_go_through_the_inbox(setup: Setup) -> None:
    setup.runner.open()
    await setup.collect(request("a", max_tokens=1))
    probed = await setup.engine.probe(tuple(prompt(1, 10)), "")
    assert probed.cached_tokens == 9
    assert len(probed.block_digests) == 2
    assert (await setup.engine.probe(tuple(prompt(1, 10)), "other salt")).cached_tokens == 0
    cleared = await setup.engine.clear_cache()
    assert (cleared.blocks, cleared.bytes) == (3, 3 * 32)
    assert (await setup.engine.probe(tuple(prompt(1, 10)), "")).cached_tokens == 0


async def test_live_requests_are_listed(setup: Setup) -> None:
    task = asyncio.ensure_future(setup.collect(request("a")))
    await setup.begun()
    listed = asyncio.ensure_future(setup.engine.requests())
    await asyncio.sleep(0)
    setup.runner.gate.release()
    infos = await listed
    assert [(info.request_id, info.status, info.computed_tokens) for info in infos] == [
        ("a", "running", 10)
    ]
    setup.runner.open()
    await task
    assert await setup.engine.requests() == ()


async def test_drain_lets_running_requests_finish_and_refuses_new_ones() -> None:
    setup = Setup()
    running = asyncio.ensure_future(setup.collect(request("a")))
    await setup.begun()
    drained = asyncio.ensure_future(setup.engine.drain(60.0))
    await asyncio.sleep(0)
    with pytest.raises(EngineStopped):
        await setup.collect(request("b"))
    setup.runner.open()
    assert (await running)[-1].finish_reason is FinishReason.LENGTH
    await drained
    assert not setup.engine.is_alive()
    with pytest.raises(EngineStopped):
        await setup.engine.stats()


async def test_drain_aborts_what_does_not_finish_in_time() -> None:
    setup = Setup()
    running = asyncio.ensure_future(setup.collect(request("a", max_tokens=150)))
    await setup.begun()
    drained = asyncio.ensure_future(setup.engine.drain(0.0))
    await asyncio.sleep(0)
    setup.runner.open()
    await drained
    assert (await running)[-1].finish_reason in {FinishReason.ABORT, FinishReason.LENGTH}
    await setup.engine.drain(0.0)  # a second time does no harm


async def test_a_dead_loop_leaves_nobody_hanging(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup()
    assert setup.engine.is_alive()
    victim = asyncio.ensure_future(setup.collect(request("a")))
    await setup.begun()

    def broken(*_: object) -> list[OutputEvent]:
        raise AssertionError("a fault in the scheduler itself")

    monkeypatch.setattr(setup.harness.scheduler, "commit", broken)
    setup.runner.open()
    events = await victim
    assert events[-1].finish_reason is FinishReason.ERROR
    assert not setup.engine.is_alive()
    with pytest.raises(EngineStopped):
        await setup.collect(request("b"))


async def test_who_ended_in_the_fatal_step_is_not_left_hanging_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setup = Setup()
    victim = asyncio.ensure_future(setup.collect(request("a", max_tokens=1)))
    await setup.begun()
    commit = setup.harness.scheduler.commit

    def broken(plan: StepPlan, result: StepResult) -> list[OutputEvent]:
        assert commit(plan, result)[-1].finish_reason is not None
        raise AssertionError("a fault behind the last row")

    monkeypatch.setattr(setup.harness.scheduler, "commit", broken)
    setup.runner.open()
    assert [event.finish_reason for event in await victim] == [FinishReason.ERROR]


async def test_a_drain_does_not_wait_for_a_loop_that_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup()
    victim = asyncio.ensure_future(setup.collect(request("a")))
    await setup.begun()
    drained = asyncio.ensure_future(setup.engine.drain(1e6))
    await asyncio.sleep(0)

    def lost(plan: StepPlan) -> StepResult:
        raise RunnerLost("the device is gone")

    monkeypatch.setattr(setup.harness.runner, "run", lost)
    setup.runner.open()
    await drained
    assert (await victim)[-1].finish_reason is FinishReason.ERROR


async def test_an_id_in_use_harms_nobody(setup: Setup) -> None:
    first = asyncio.ensure_future(setup.collect(request("a")))
    await setup.begun()
    with pytest.raises(InvalidRequest, match="id a"):
        await setup.collect(request("a"))
    setup.runner.open()
    assert (await first)[-1].finish_reason is FinishReason.LENGTH


def test_a_step_is_timed_from_its_own_beginning() -> None:
    """And not from when the loop fell asleep before it: that would look like a hung step."""
    harness, clock, started = Harness(), [0.0], []
    inbox = Inbox()

    class Watched:
        def run(self, plan: StepPlan) -> StepResult:
            started.append(loop.step_started_seconds)
            return harness.runner.run(plan)

    timing = Timing(lambda: clock[0], SilentTelemetry())
    loop = EngineLoop(harness.scheduler, Watched(), inbox, lambda events: None, timing)
    assert loop.step_started_seconds is None

    def arrive() -> None:
        clock[0] = 900.0
        loop.submit(request("a"), 900.0)

    inbox.post(arrive)
    loop.turn()
    assert started == [900.0]
    assert loop.step_started_seconds is None


async def test_what_building_raises_reaches_whoever_starts_the_engine() -> None:
    def build(inbox: Inbox, deliver: Deliver) -> EngineParts:
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        ThreadedEngine.start(build)


def test_a_step_that_raises_leaves_the_loop_turning() -> None:
    harness = Harness()
    events: list[OutputEvent] = []
    fails: list[Callable[[], StepResult]] = []

    class Runner:
        def run(self, plan: StepPlan) -> StepResult:
            if fails:
                return fails.pop()()
            return harness.runner.run(plan)

    def fail() -> StepResult:
        raise RuntimeError("out of memory")

    inbox = Inbox()
    timing = Timing(lambda: 0.0, SilentTelemetry())
    loop = EngineLoop(harness.scheduler, Runner(), inbox, events.extend, timing)
    fails.append(fail)
    loop.submit(request("a"), 0.0)
    loop.turn()
    assert events[-1].error == "the step failed: RuntimeError: out of memory"
    loop.submit(request("b"), 0.0)
    while harness.scheduler.has_work:
        loop.turn()
    assert events[-1].finish_reason is FinishReason.LENGTH
