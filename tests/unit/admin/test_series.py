"""The figures of the last quarter of an hour."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from engine.values.stats import Latency
from server.admin.activity import INTERVAL_SECONDS, KEPT_SECONDS, N_POINTS, SeriesRecord
from tests.contract.fake_engine import FakeEngine, observed


class Engine:
    """Says what it has counted, and what time it is."""

    def __init__(self) -> None:
        self.now = 50.0
        self.stats = asyncio.run(FakeEngine().stats())

    def counts(self, **counters: Any) -> None:
        self.stats = replace(self.stats, **counters)

    def evicts(self, blocks: int) -> None:
        cache = self.stats.cache
        self.counts(cache=replace(cache, evictions=cache.evictions + blocks))

    def finds(self, tokens: int) -> None:
        """A prompt of which as many tokens are cached."""
        cache = self.stats.cache
        self.counts(cache=replace(cache, hit_tokens=cache.hit_tokens + tokens))


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def series(engine: Engine) -> SeriesRecord:
    made = SeriesRecord(lambda: engine.now, lambda: 1e9 + engine.now)
    made.add({"m": engine.stats})
    return made


def test_a_point_is_what_happened_since_the_one_before(
    engine: Engine, series: SeriesRecord
) -> None:
    assert series.points() == []
    stats = engine.stats
    engine.counts(
        generated_tokens=stats.generated_tokens + 12,
        computed_prompt_tokens=stats.computed_prompt_tokens + 10,
        latencies=observed(Latency.FIRST_TOKEN, 0.125, 0.375),
        running=3,
        waiting=1,
    )
    engine.finds(30)
    engine.evicts(8)
    engine.now += 4
    series.add({"m": engine.stats})
    (point,) = series.points()
    assert point.model_dump() == {
        "time": 1e9 + 54,
        "generated_tokens_per_second": 3.0,
        "prompt_tokens_per_second": 10.0,
        "computed_tokens_per_second": 2.5,
        "hit_share": 0.75,
        "first_token_seconds": 0.25,
        "evicted_blocks_per_second": 2.0,
        "running": 3,
        "waiting": 1,
    }


async def test_a_fault_costs_one_point_and_not_the_rest(
    engine: Engine, series: SeriesRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = iter([ZeroDivisionError("a fault")])
    both_asked = asyncio.Event()

    async def stats() -> dict[str, Any]:
        engine.now += INTERVAL_SECONDS
        for fault in faults:
            raise fault
        both_asked.set()
        return {"m": engine.stats}

    async def no_time(seconds: float) -> None:
        await asyncio.sleep(0)

    monkeypatch.setattr("server.admin.activity.sleep", no_time)
    running = asyncio.create_task(series.run(stats))
    done, _ = await asyncio.wait(
        {running, asyncio.create_task(both_asked.wait())}, return_when=asyncio.FIRST_COMPLETED
    )
    assert running not in done
    running.cancel()


def test_where_nothing_happened_there_are_gaps(engine: Engine, series: SeriesRecord) -> None:
    engine.now += 3
    series.add({"m": engine.stats})
    (point,) = series.points()
    assert (point.hit_share, point.first_token_seconds) == (None, None)
    assert point.generated_tokens_per_second == 0
    series.add({"m": engine.stats})
    assert series.n_points == 1, "no time has passed"


def test_a_quarter_of_an_hour_is_kept(engine: Engine, series: SeriesRecord) -> None:
    for _ in range(N_POINTS + 7):
        engine.now += INTERVAL_SECONDS
        series.add({"m": engine.stats})
    points = series.points()
    assert len(points) == N_POINTS
    assert points[-1].time - points[0].time == KEPT_SECONDS - INTERVAL_SECONDS
    assert series.points(series.n_points - 2) == points[-2:]
    assert series.points(series.n_points) == []
    assert series.points(3) == points, "the first are gone"
