"""Watches of the cache that begin and end."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
from anyio import create_task_group

from engine.api import CacheWatch
from engine.values.picture import NodeTokens
from server import cache_feed
from server.cache_feed import CacheFeed
from tests.contract.fake_engine import FakeEngine, FakeWatch


class Watch(FakeWatch):
    """Knows whether it has been ended."""

    is_ended = False

    async def node(self, node_id: int, most_tokens: int) -> NodeTokens | None:
        assert not self.is_ended, "a look at it would begin it again"
        return await super().node(node_id, most_tokens)


class SlowToEnd(FakeEngine):
    """Whose watches end when a test lets them."""

    def __init__(self) -> None:
        super().__init__()
        self.ends, self.may_end = asyncio.Event(), asyncio.Event()

    @asynccontextmanager
    async def watch(self) -> AsyncGenerator[CacheWatch]:
        watch = Watch(self)
        try:
            yield watch
        finally:
            watch.is_ended = True
            self.ends.set()
            await self.may_end.wait()


async def test_a_look_at_a_node_finds_no_watch_that_is_being_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cache_feed, "LINGER_SECONDS", 0.0)
    monkeypatch.setattr(cache_feed, "INTERVAL_SECONDS", 0.0)
    engine = SlowToEnd()
    engine.node_tokens = {7: (1, 2, 3)}
    async with create_task_group() as tasks:
        feed = CacheFeed(engine, "m", tasks)
        async with feed.watching():
            await feed.picture()
        await engine.ends.wait()
        async with feed.watching():
            looking = asyncio.ensure_future(feed.node(7, 2))
            await asyncio.sleep(0)
            engine.may_end.set()
            assert await looking == NodeTokens(7, 3, (1, 2))
