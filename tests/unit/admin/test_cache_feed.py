"""The server follows an engine's cache by what has changed in it."""

import asyncio
import json
from dataclasses import dataclass, field, replace

import pytest

from engine.api import EngineStopped
from engine.values.tree import TreeChanges, TreeNode, TreeSnapshot
from server.admin import watch
from server.admin.watch import CacheFeed, Frame
from tests.contract.fake_engine import PICTURE, FakeEngine

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


async def test_an_engine_that_has_forgotten_sends_all_again() -> None:
    engine = ChangingEngine()
    feed = CacheFeed(engine, "m")
    await feed.fresh()
    engine.earlier.clear()
    engine.picture = grown(PICTURE)
    assert nodes_of(await feed.fresh()) == shown(engine.picture.nodes)
    assert engine.sent == [TreeSnapshot, TreeSnapshot]


async def test_a_server_that_has_forgotten_asks_for_all_again() -> None:
    engine = ChangingEngine()
    feed = CacheFeed(engine, "m")
    await feed.fresh()
    feed.forget()
    assert nodes_of(await feed.fresh()) == shown(PICTURE.nodes)
    assert engine.sent == [TreeSnapshot, TreeSnapshot]


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


async def test_a_costly_snapshot_is_made_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "SHARE", 0.001)
    engine = ChangingEngine(picture=replace(PICTURE, cost_seconds=1.0))
    feed = CacheFeed(engine, "m")
    await feed.poll()
    await feed.poll()
    assert engine.looks == 1


async def test_one_that_took_long_by_chance_delays_the_next_by_seconds_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch, "MAX_CACHE_SECONDS", 0.0)
    engine = ChangingEngine(picture=replace(PICTURE, cost_seconds=1.0))
    feed = CacheFeed(engine, "m")
    await feed.poll()
    await feed.poll()
    assert engine.looks == 2
