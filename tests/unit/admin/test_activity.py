"""What /admin tells: the feed of a cache's tree, and series."""

import asyncio
import json
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from engine.api import EngineStopped
from engine.values.stats import Latency
from engine.values.tree import TreeChanges, TreeNode, TreeSnapshot
from server.admin import watch
from server.admin.activity import INTERVAL_SECONDS, KEPT_SECONDS, N_POINTS, SeriesRecord
from server.admin.watch import CacheFeed, Frame
from tests.contract.fake_engine import PICTURE, FakeEngine, observed

SECONDS = 20.0


def grown(before: TreeSnapshot, holders: int = 0) -> TreeSnapshot:
    """The next version, with another first node and other holders of the last."""
    new = replace(before.nodes[0], id=before.version + 10)
    last = replace(before.nodes[-1], holders=holders)
    return replace(before, version=before.version + 1, nodes=(new, *before.nodes[:-1], last))


@dataclass
class ChangingEngine(FakeEngine):
    """Sends what has changed since the version that the caller has."""

    earlier: dict[int, TreeSnapshot] = field(default_factory=dict)
    sent: list[type] = field(default_factory=list)
    slow: int = 0  # calls that are not answered soon

    async def tree(self, since: int) -> TreeSnapshot | TreeChanges:
        if self.slow:
            self.slow -= 1
            raise TimeoutError
        now = await super().tree(since)
        assert isinstance(now, TreeSnapshot)
        before = self.earlier.get(since)
        answer = now if before is None else TreeChanges.between(before, now)
        self.earlier[now.version] = now
        self.sent.append(type(answer))
        return answer


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "MIN_CACHE_SECONDS", 0.0)
    monkeypatch.setattr(watch, "SHARE", 1e9)


def nodes_of(frame: Frame) -> list[dict[str, object]]:
    return [
        {"id": node["id"], "holders": node["holders"]} for node in json.loads(frame.body)["nodes"]
    ]


def shown(nodes: tuple[TreeNode, ...]) -> list[dict[str, object]]:
    return [{"id": node.id, "holders": node.holders} for node in nodes]


async def test_changes_add_up_to_the_whole() -> None:
    engine = ChangingEngine()
    feed = CacheFeed(engine, "m")
    assert nodes_of(await feed.fresh()) == shown(PICTURE.nodes)
    for holders in range(3):
        engine.picture = grown(engine.picture, holders=holders)
        assert nodes_of(await feed.fresh()) == shown(engine.picture.nodes)
    engine.picture = replace(engine.picture, version=9, nodes=engine.picture.nodes[1:])
    assert nodes_of(await feed.fresh()) == shown(engine.picture.nodes)
    assert engine.sent == [TreeSnapshot] + [TreeChanges] * 4


async def test_an_engine_or_a_server_that_has_forgotten_has_all_sent_again() -> None:
    engine = ChangingEngine()
    feed = CacheFeed(engine, "m")
    await feed.fresh()
    engine.earlier.clear()
    engine.picture = grown(PICTURE)
    assert nodes_of(await feed.fresh()) == shown(engine.picture.nodes)
    feed.forget()
    assert nodes_of(await feed.fresh()) == shown(engine.picture.nodes)
    assert engine.sent == [TreeSnapshot] * 3


async def test_an_engine_that_does_not_answer_soon_is_shown_as_it_was() -> None:
    engine = ChangingEngine(slow=2)
    feed = CacheFeed(engine, "m")
    assert (await feed.fresh()).version == 1, "asked until there is something to show"
    engine.picture, engine.slow = grown(PICTURE), 1
    assert (await feed.fresh()).version == 1
    assert (await feed.fresh()).version == 2


async def test_who_waits_gets_the_next_version_and_the_end() -> None:
    engine = ChangingEngine()
    feed = CacheFeed(engine, "m")
    await feed.fresh()
    async with asyncio.timeout(SECONDS):
        waiting = asyncio.ensure_future(feed.next_after(1))
        await feed.poll()
        await asyncio.sleep(0)
        assert not waiting.done(), "nothing has changed"
        engine.picture = grown(PICTURE)
        await feed.poll()
        assert (await waiting).version == 2
        waiting = asyncio.ensure_future(feed.next_after(2))
        await asyncio.sleep(0)
        engine.script.dead = True
        await feed.poll()
        with pytest.raises(EngineStopped):
            await waiting


@pytest.mark.parametrize(("most_seconds", "looks"), [(60.0, 1), (0.0, 2)])
async def test_a_costly_snapshot_is_made_less_often_and_delays_the_next_by_seconds_at_most(
    most_seconds: float, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "SHARE", 0.001)
    monkeypatch.setattr(watch, "MAX_CACHE_SECONDS", most_seconds)
    engine = ChangingEngine(picture=replace(PICTURE, cost_seconds=1.0))
    feed = CacheFeed(engine, "m")
    await feed.poll()
    await feed.poll()
    assert engine.looks == looks


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
