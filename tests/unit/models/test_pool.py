"""Requests that wait for models, and models that load, end and die."""

import asyncio
import math
import random
from collections.abc import AsyncIterator
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    suppress,
)

import anyio.lowlevel
import pytest
import pytest_asyncio
from anyio import Event, create_task_group, fail_after

from server.admin_schema import State
from server.models.model import LoadedModel, Model
from server.models.policy import (
    Draining,
    Failed,
    Measuring,
    Queued,
    Ready,
    Resident,
    Unknown,
    need_of,
)
from server.models.pool import (
    LoadFailed,
    ModelPool,
    NeverFits,
    PoolClosed,
    PoolError,
    WaitedTooLong,
)
from server.settings.models import ModelSettings
from tests.contract.fake_engine import FakeEngine

SECONDS = 60.0


class Process(FakeEngine):
    """An engine that runs until it is drained, or dies."""

    def __init__(self) -> None:
        super().__init__()
        self.over = Event()
        self.how = ""

    async def ended(self) -> str:
        await self.over.wait()
        return self.how

    async def drain(self, timeout_seconds: float) -> None:
        self.die("drained")

    def die(self, how: str) -> None:
        self.how = self.how or how
        self.over.set()


class Source:
    """Loads models when it may."""

    def __init__(self, need_bytes: int) -> None:
        self.need_bytes = need_bytes
        self.may_load = Event()
        self.may_load.set()
        self.failure: Exception | None = None
        self.measuring_failure: Exception | None = None
        self.given_bytes: list[int] = []
        self.n_measured = 0
        self.loaded: list[Process] = []

    async def start(self, memory_bytes: int) -> Process:
        self.given_bytes.append(memory_bytes)
        await self.may_load.wait()
        if self.failure is not None:
            raise self.failure
        self.loaded.append(Process())
        return self.loaded[-1]

    async def measure(self) -> int:
        self.n_measured += 1
        await anyio.lowlevel.checkpoint()
        if self.measuring_failure is not None:
            raise self.measuring_failure
        return self.need_bytes


class House:
    """A pool of a hundred bytes, with a clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0
        self.sources: dict[str, Source] = {}
        self.pool = ModelPool(self.measure, self.load, 100, SECONDS, lambda: self.now)

    async def measure(self, model: Model) -> int:
        return await self.sources[model.name].measure()

    async def load(self, model: Model, memory_bytes: int) -> LoadedModel:
        engine = await self.sources[model.name].start(memory_bytes)
        return LoadedModel(model, engine, {})

    def add(
        self,
        name: str,
        need_bytes: int,
        ttl_seconds: float | None = None,
        is_pinned: bool = False,
    ) -> Source:
        source = self.sources[name] = Source(need_bytes)
        settings = ModelSettings(served_model_name=(name,), ttl_seconds=ttl_seconds)
        self.pool.add(Model(settings, is_pinned=is_pinned))
        return source

    @asynccontextmanager
    async def using(
        self, name: str, key: str = "", keep_seconds: float | None = None
    ) -> AsyncIterator[Process]:
        async with self.pool.using(self.pool.models[name], key, keep_seconds) as loaded:
            assert isinstance(loaded.engine, Process)
            yield loaded.engine

    async def use(self, name: str, key: str = "", keep_seconds: float | None = None) -> None:
        async with self.using(name, key, keep_seconds):
            pass

    async def use_in_vain(
        self, name: str, key: str = "", keep_seconds: float | None = None
    ) -> None:
        """Wait too long for a model that has begun to load, and whose other client has left."""
        async with create_task_group() as tasks:
            tasks.start_soon(self.use, name, key, keep_seconds)
            await self.until(name, State.LOADING)
            tasks.cancel_scope.cancel()
        self.pool._load_timeout_seconds = 0.001
        with pytest.raises(WaitedTooLong):
            await self.use(name, key, keep_seconds)

    def state(self, name: str) -> State:
        return self.pool.models[name].public_state

    def seconds_left(self, name: str) -> float | None:
        return self.pool.models[name].seconds_left(self.now)

    async def until(self, name: str, state: State) -> None:
        model = self.pool.models[name]
        with fail_after(SECONDS):
            while model.public_state is not state:
                await model.changed.wait()

    async def waiting(self, name: str, n: int) -> None:
        with fail_after(SECONDS):
            model = self.pool.models[name]
            while len(model.waiting) < n or isinstance(model.state, Unknown | Measuring):
                await anyio.lowlevel.checkpoint()

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.pool.turn()


class Started:
    """What `run` tells when the pool may be used."""

    def __init__(self) -> None:
        self.event = Event()

    def started(self, value: None = None) -> None:
        self.event.set()


@pytest_asyncio.fixture
async def house() -> AsyncIterator[House]:
    house, status = House(), Started()
    running = asyncio.create_task(house.pool.run(task_status=status))
    await status.event.wait()
    yield house
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


async def test_one_load_however_many_wait(house: House) -> None:
    source = house.add("a", 60)
    source.may_load = Event()
    served: list[Process] = []

    async def ask() -> None:
        async with house.using("a") as model:
            served.append(model)

    async with create_task_group() as tasks:
        for _ in range(16):
            tasks.start_soon(ask)
        await house.waiting("a", 16)
        source.may_load.set()
    assert served == source.loaded * 16
    assert (source.n_measured, source.given_bytes) == (1, [60])
    state = house.pool.models["a"].state
    assert isinstance(state, Ready)
    assert state.n_leases == 0


async def test_room_is_made_before_it_is_used(house: House) -> None:
    house.add("a", 60)
    other = house.add("b", 60)
    async with house.using("a") as first:
        pass
    async with house.using("b"):
        assert first.over.is_set(), "a's process has ended before b's began"
        assert house.state("a") is State.UNLOADED
    assert other.given_bytes == [60]


async def test_who_uses_a_model_ends_before_it_goes(house: House) -> None:
    house.add("a", 60)
    house.add("b", 60)
    async with AsyncExitStack() as uses, create_task_group() as tasks:
        first = await uses.enter_async_context(house.using("a"))

        async def ask() -> None:
            await house.use("b")

        tasks.start_soon(ask)
        await house.waiting("b", 1)
        assert house.state("a") is State.READY
        house.pass_time(2 * 5.0)  # as long as loading both takes
        assert house.state("a") is State.DRAINING
        assert not first.over.is_set()
        await uses.aclose()
    assert first.over.is_set()
    assert house.state("b") is State.READY


async def test_the_longest_wish_keeps_a_model(house: House) -> None:
    house.add("a", 60, ttl_seconds=30.0)
    await house.use("a", "x", 100.0)
    await house.use("a", "y")
    await house.use("a", "z", 0.0)
    house.pass_time(99.0)
    assert house.state("a") is State.READY
    assert house.seconds_left("a") == 1.0
    house.pass_time(1.0)
    await house.until("a", State.UNLOADED)


async def test_a_wish_of_an_earlier_residency_keeps_nothing(house: House) -> None:
    house.add("a", 60, ttl_seconds=30.0)
    await house.use("a", "x", math.inf)
    await house.pool.unload(house.pool.models["a"])
    await house.use("a", "x")
    house.pass_time(30.0)
    await house.until("a", State.UNLOADED)


async def test_a_wish_without_an_end_gives_way_to_memory(house: House) -> None:
    house.add("a", 60)
    house.add("b", 60)
    await house.use("a", "x", math.inf)
    house.pass_time(1e9)
    assert house.state("a") is State.READY
    async with house.using("b"):
        assert house.state("a") is State.UNLOADED


async def test_a_load_that_no_request_awaits_any_more_has_the_default_wish(house: House) -> None:
    source = house.add("a", 60, ttl_seconds=30.0)
    source.may_load = Event()
    await house.use_in_vain("a", "x", 0.0)
    source.may_load.set()
    await house.until("a", State.READY)
    house.pass_time(29.0)
    assert house.state("a") is State.READY
    house.pass_time(1.0)
    await house.until("a", State.UNLOADED)


async def test_a_withdrawal_counts_for_requests_that_run_or_wait(house: House) -> None:
    source = house.add("a", 60, ttl_seconds=30.0)
    source.may_load = Event()
    async with create_task_group() as tasks:
        tasks.start_soon(house.use, "a", "x", math.inf)
        await house.waiting("a", 1)
        house.pool.withdraw(house.pool.models["a"], "x")
        source.may_load.set()
    await house.until("a", State.UNLOADED)
    async with house.using("a", "x", math.inf):
        house.pool.withdraw(house.pool.models["a"], "x")
        house.pool.turn()
        assert house.state("a") is State.READY
        assert house.seconds_left("a") == 0.0
    await house.until("a", State.UNLOADED)


@pytest.mark.parametrize("seed", range(20))
async def test_a_model_is_loaded_as_long_as_a_list_of_wishes_says(house: House, seed: int) -> None:
    """Random uses, withdrawals and pauses, against all wishes of the residency in a list."""
    rng = random.Random(seed)
    ttl_seconds = rng.choice([None, 7.0])
    house.add("a", 60, ttl_seconds=ttl_seconds)
    ends: list[tuple[str, float]] = []
    running: list[tuple[str, float, AbstractAsyncContextManager[Process]]] = []
    for _ in range(200):
        key = rng.choice("xyz")
        match rng.choice(["begin", "end", "withdraw", "pause"]):
            case "begin":
                wish = rng.choice([None, 0.0, 3.0, 20.0, math.inf])
                default = math.inf if ttl_seconds is None else ttl_seconds
                begun = house.using("a", key, wish)
                await begun.__aenter__()
                running.append((key, default if wish is None else wish, begun))
            case "end" if running:
                key, seconds, using = running.pop(rng.randrange(len(running)))
                await using.__aexit__(None, None, None)
                ends.append((key, house.now + seconds))
            case "withdraw":
                house.pool.withdraw(house.pool.models["a"], key)
                ends = [(other, end) for other, end in ends if other != key]
                running = [(k, 0.0 if k == key else s, using) for k, s, using in running]
            case "pause":
                house.pass_time(rng.choice([1.0, 5.0]))
        is_kept = bool(running) or any(end > house.now for _, end in ends)
        await house.until("a", State.READY if is_kept else State.UNLOADED)
        house.pool.turn()
        assert (house.state("a") is State.READY) == is_kept, f"seed {seed}"
        if not is_kept:
            ends.clear()
    for _, _, using in running:
        await using.__aexit__(None, None, None)


async def test_what_never_fits_is_refused_at_once(house: House) -> None:
    source = house.add("a", 101)
    with pytest.raises(NeverFits):
        await house.use("a")
    assert source.given_bytes == []


async def test_what_is_loaded_at_start_is_measured_once_and_pushes_nothing_out(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    first, large, small = house.add("a", 60), house.add("b", 60), house.add("c", 40)
    for name in house.sources:
        await house.pool.preload(house.pool.models[name])
    assert [house.state(name) for name in "abc"] == [State.READY, State.UNLOADED, State.READY]
    assert [each.n_measured for each in (first, large, small)] == [1, 1, 1]
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "b is not loaded at start"
    ]
    async with house.using("b"):
        assert large.n_measured == 1


async def test_the_first_is_loaded_at_start_or_says_why_not(house: House) -> None:
    house.add("a", 101)
    with pytest.raises(NeverFits):
        await house.pool.preload(house.pool.models["a"])


async def test_a_load_that_fails_is_remembered_and_tried_again_later(house: House) -> None:
    source = house.add("a", 60)
    source.failure = ValueError("no weights")
    for seconds in (1.0, 2.0, 4.0):
        for _ in range(2):
            with pytest.raises(LoadFailed, match="no weights") as failed:
                await house.use("a")
            assert failed.value.retry_after_seconds == seconds
        house.pass_time(seconds)
    assert len(source.given_bytes) == 3
    source.failure = None
    await house.use("a")
    assert house.pool.models["a"].failure is None


async def test_a_failure_is_remembered_while_another_attempt_waits_or_loads(house: House) -> None:
    source = house.add("a", 60)
    house.add("b", 60)
    source.failure = ValueError("no weights")
    with pytest.raises(LoadFailed):
        await house.use("a")
    house.pass_time(1.0)
    model = house.pool.models["a"]
    async with house.using("b"), create_task_group() as tasks:
        tasks.start_soon(house.use, "a")
        await house.waiting("a", 1)
        assert isinstance(model.state, Queued)
        assert house.state("a") is State.FAILED
        tasks.cancel_scope.cancel()
    assert isinstance(model.state, Failed), "nobody waits any more"
    source.failure, source.may_load = None, Event()
    async with create_task_group() as tasks:
        tasks.start_soon(house.use, "a")
        await house.until("a", State.LOADING)
        assert model.failure is not None
        source.may_load.set()
    assert model.failure is None


async def test_who_comes_while_a_model_drains_is_before_who_comes_later(house: House) -> None:
    house.add("z", 60)
    house.add("b", 60)
    served: list[str] = []

    async def ask(name: str) -> None:
        async with house.using(name):
            served.append(name)

    async with create_task_group() as tasks, house.using("z"):
        tasks.start_soon(house.pool.unload, house.pool.models["z"])
        await house.until("z", State.DRAINING)
        tasks.start_soon(ask, "z")
        await house.waiting("z", 1)
        house.now += 1
        tasks.start_soon(ask, "b")
        await house.waiting("b", 1)
    assert served == ["z", "b"]


async def test_the_next_request_starts_a_dead_model_again(house: House) -> None:
    source = house.add("a", 60)
    for _ in range(3):
        await house.use("a")
        source.loaded[-1].die("SIGKILL")
        await house.until("a", State.FAILED)
    failure = house.pool.models["a"].failure
    assert failure is not None
    assert failure.reason == "SIGKILL"
    async with house.using("a") as model:
        assert not model.over.is_set()
    assert len(source.loaded) == 4


async def test_one_that_dies_before_it_has_served_is_not_started_over_and_over(
    house: House,
) -> None:
    source = house.add("a", 60)
    async with AsyncExitStack() as uses:
        await uses.enter_async_context(house.using("a"))
        source.loaded[-1].die("SIGKILL")
        await house.until("a", State.FAILED)
        with pytest.raises(LoadFailed, match="SIGKILL"):
            await uses.enter_async_context(house.using("a"))
    house.pass_time(1.0)
    await house.use("a")


async def test_a_pinned_model_is_started_again_by_itself(house: House) -> None:
    source = house.add("a", 60, is_pinned=True)
    await house.use("a")
    source.loaded[-1].die("SIGKILL")
    await house.until("a", State.FAILED)
    await house.until("a", State.READY)
    assert len(source.loaded) == 2


async def test_a_pinned_model_that_cannot_be_measured_is_refused_and_the_others_go_on(
    house: House,
) -> None:
    source, other = house.add("a", 60, is_pinned=True), house.add("b", 100)
    source.measuring_failure = ValueError("no config.json")
    for _ in range(3):
        with pytest.raises(LoadFailed, match=r"memory_budget: no config\.json"):
            await house.use("a")
        house.pass_time(100.0)  # it could be tried again
        assert house.state("a") is State.FAILED
        async with house.using("b") as model:
            assert not model.over.is_set()
    assert (source.given_bytes, source.n_measured, len(other.loaded)) == ([], 3, 1)
    source.measuring_failure = None
    async with house.using("a"):
        assert source.given_bytes == [60]


async def test_who_waits_too_long_is_told_so(house: House) -> None:
    source = house.add("a", 60)
    source.may_load = Event()
    await house.use_in_vain("a")
    assert not house.pool.models["a"].waiting
    source.may_load.set()
    await house.until("a", State.READY)


async def test_an_admin_unloads_whatever_the_clock_says(house: House) -> None:
    house.add("a", 60, is_pinned=True)
    await house.use("a")
    await house.pool.unload(house.pool.models["a"])
    assert house.state("a") is State.UNLOADED
    house.pass_time(1000.0)
    assert house.state("a") is State.UNLOADED, "it is loaded when it is asked for"


async def test_a_stop_ends_all_and_refuses_who_waits(house: House) -> None:
    loaded = house.add("a", 30)
    slow = house.add("b", 30)
    slow.may_load = Event()
    await house.use("a")
    refused: list[Exception] = []

    async def ask() -> None:
        try:
            await house.use("b")
        except PoolError as error:
            refused.append(error)

    async with create_task_group() as tasks:
        tasks.start_soon(ask)
        await house.waiting("b", 1)
        await house.pool.drain(1.0)
    assert [type(error) for error in refused] == [PoolClosed]
    assert loaded.loaded[0].over.is_set()
    with pytest.raises(PoolClosed):
        await house.use("a")


async def test_another_figure_than_computed_counts(house: House) -> None:
    house.add("a", 40)
    house.add("b", 50)
    async with house.using("a"):
        house.pool.correct(house.pool.models["a"], 60)
    async with house.using("b"):
        assert house.state("a") is State.UNLOADED
    house.pool.correct(house.pool.models["a"], 10)
    need = need_of(house.pool.models["a"].state)
    assert need is not None
    assert need.bytes == 60, "it is not there to be measured"


@pytest.mark.parametrize("seed", range(6))
async def test_whatever_happens_every_request_ends_within_the_budget(
    house: House, seed: int
) -> None:
    """Requests of all kinds, deaths and failures in a random order."""
    rng = random.Random(seed)
    for index in range(5):
        house.add(f"m{index}", rng.randint(20, 70), ttl_seconds=rng.choice([3.0, 1e9]))
    ended = 0

    async def ask(name: str, turns: int) -> None:
        nonlocal ended
        try:
            async with house.using(name):
                for _ in range(turns):
                    await anyio.lowlevel.checkpoint()
        except LoadFailed:
            pass
        ended += 1

    with fail_after(6 * SECONDS):
        async with create_task_group() as tasks:
            for _ in range(400):
                name = rng.choice(list(house.sources))
                source = house.sources[name]
                tasks.start_soon(ask, name, rng.randint(0, 20))
                source.failure = ValueError("it fails") if rng.random() < 0.1 else None
                if source.loaded and rng.random() < 0.1:
                    source.loaded[-1].die("SIGKILL")
                for _ in range(rng.randint(0, 10)):
                    await anyio.lowlevel.checkpoint()
                    _check(house)
                house.pass_time(rng.expovariate(1.0))
            while ended < 400:
                house.pass_time(1.0)
                _check(house)
                await anyio.lowlevel.checkpoint()
    for model in house.pool.models.values():
        assert not model.waiting
        assert not (model.loaded and model.loaded.leases)


def _check(house: House) -> None:
    states = [model.state for model in house.pool.models.values()]
    assert sum(state.need.bytes for state in states if isinstance(state, Resident)) <= 100
    for model in house.pool.models.values():
        assert (model.loaded is not None) == isinstance(model.state, Ready | Draining)
    for name, source in house.sources.items():
        alive = sum(not process.over.is_set() for process in source.loaded)
        assert alive <= 1, f"{name} is loaded twice"
