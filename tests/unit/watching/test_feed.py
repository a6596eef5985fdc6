"""The engine's answers to a caller that follows the cache."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from engine.api import InvalidRequest
from engine.values.tree import NodeTokens, TreeChanges, TreeSnapshot
from engine.watch import feed
from tests.unit.engine_harness import prompt
from tests.unit.threaded_harness import Setup, request

PATIENCE = 30.0


@pytest_asyncio.fixture
async def setup() -> AsyncIterator[Setup]:
    made = Setup()
    made.runner.open()
    yield made
    await made.engine.drain(0.0)


async def whole(setup: Setup) -> TreeSnapshot:
    """A snapshot for a caller that has none."""
    snapshot = await setup.engine.tree(0)
    assert isinstance(snapshot, TreeSnapshot)
    return snapshot


async def changes(setup: Setup, since: int) -> TreeChanges:
    """The changes for a caller that has that version."""
    found = await setup.engine.tree(since)
    assert isinstance(found, TreeChanges)
    assert found.since == since
    return found


async def test_a_caller_gets_what_has_changed_since_its_version(setup: Setup) -> None:
    await setup.collect(request("a"))
    before = await whole(setup)
    same = await changes(setup, before.version)
    assert (same.snapshot.version, same.snapshot.nodes) == (before.version, ())
    assert same.applied_to(before).nodes == before.nodes
    await setup.collect(request("b", n_tokens=12))
    grown = await changes(setup, before.version)
    after = grown.applied_to(before)
    assert after.version == grown.snapshot.version > before.version
    assert [node.start for node in after.nodes if node.parent is None] == [0]
    assert sum(node.tokens for node in after.nodes) > sum(node.tokens for node in before.nodes)
    with pytest.raises(InvalidRequest):
        await setup.collect(request("refused", max_tokens=-1))
    counted = await changes(setup, after.version)
    assert counted.snapshot.nodes == (), "no node has changed"
    assert counted.snapshot.counters.requests == 3


async def test_a_caller_with_another_version_gets_everything(setup: Setup) -> None:
    await setup.collect(request("a"))
    first = await whole(setup)
    await setup.collect(request("b", n_tokens=12))
    await changes(setup, first.version)
    assert isinstance(await setup.engine.tree(first.version), TreeSnapshot)


async def test_a_feed_that_nobody_asks_forgets(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    await setup.collect(request("a"))
    monkeypatch.setattr(feed, "IDLE_SECONDS", 0.0)
    version = (await whole(setup)).version
    async with asyncio.timeout(PATIENCE):
        while isinstance(found := await setup.engine.tree(version), TreeChanges):
            version = found.snapshot.version
    assert found.version > version, "no version names two snapshots"


async def test_the_tokens_of_a_node(setup: Setup) -> None:
    await setup.collect(request("a", max_tokens=1))
    (node,) = (await whole(setup)).nodes
    first = tuple(prompt(1, 10))[:3]
    assert await setup.engine.node(node.id, 3) == NodeTokens(node.id, node.tokens, first)
    await setup.engine.clear_cache()
    assert await setup.engine.node(node.id, 3) is None


async def test_the_tokens_of_nodes_that_were_split(setup: Setup) -> None:
    await setup.collect(request("a", n_tokens=12, max_tokens=1))
    await whole(setup)
    await setup.collect(request("b", n_tokens=10, max_tokens=1))
    for node in (await whole(setup)).nodes:
        found = await setup.engine.node(node.id, node.tokens)
        assert found is not None
        assert (found.id, found.tokens) == (node.id, node.tokens)
        assert len(found.token_ids) == node.tokens
