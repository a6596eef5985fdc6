"""What an engine's process does with the server's calls."""

import asyncio
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import cast

from engine.core.thread import EngineThread
from engine.remote.calls import EngineCalls
from engine.values.picture import CachePicture, NodeTokens
from engine.values.settings import EngineConfig
from tests.contract.fake_engine import CARD, PICTURE


class Watch:
    """Implements `CacheWatch`. Notes whether two calls overlap."""

    def __init__(self) -> None:
        self.n_running = 0
        self.most_running = 0

    async def look(self) -> int:
        await self._run()
        return 1

    async def picture(self) -> CachePicture:
        await self._run()
        return PICTURE

    async def node(self, node_id: int, most_tokens: int) -> NodeTokens | None:
        await self._run()
        return None

    async def _run(self) -> None:
        self.n_running += 1
        self.most_running = max(self.most_running, self.n_running)
        await asyncio.sleep(0)
        self.n_running -= 1


class Engine:
    """The part of an EngineThread that these tests need."""

    card = CARD

    def __init__(self) -> None:
        self.watched = Watch()

    def watch(self) -> AbstractAsyncContextManager[Watch]:
        return nullcontext(self.watched)

    def is_alive(self) -> bool:
        return True


async def test_a_watch_gets_one_call_at_a_time() -> None:
    """Whoever asked for a node may have gone, and the next look is there at once."""
    engine = Engine()
    calls = EngineCalls(lambda config: cast(EngineThread, engine))
    await calls.load(EngineConfig(""), 0)
    await calls.open_watch()
    await asyncio.gather(calls.node(1, 2), calls.look(), calls.picture(), calls.look())
    assert engine.watched.most_running == 1
