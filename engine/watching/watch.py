"""Goes between the engine thread, which tells, and a worker thread, which paints."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from engine.api import EngineStopped
from engine.types.picture import CachePicture, NodeTokens
from engine.watching.glimpse import Glimpses
from engine.watching.painter import Painter

Ask = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Has a function called between two steps, and gives its result. Raises EngineStopped."""


class LiveWatch:
    """Implements `engine.api.CacheWatch`. For one task at a time."""

    def __init__(
        self,
        ask: Ask,
        glimpses: Glimpses,
        painter: Painter,
        versions: Iterator[int],
        requests: Callable[[], int],
    ) -> None:
        self._ask = ask
        self._glimpses = glimpses
        self._painter = painter
        self._versions = versions
        self._requests = requests
        self._version = next(versions)

    async def look(self) -> int:
        is_whole = False
        while not is_whole:  # a tree that is told for the first time takes a few steps
            glimpse = await self._ask(self._glimpses.take)
            is_whole = glimpse.is_whole
            if await asyncio.to_thread(self._painter.take_in, glimpse):
                self._version = next(self._versions)
        return self._version

    def picture(self) -> CachePicture:
        return self._painter.paint(self._version, self._requests())

    async def node(self, node_id: int, most_tokens: int) -> NodeTokens | None:
        await self.look()
        found = self._painter.first_block(node_id)
        if found is None:
            return None
        n_tokens, block = found
        token_ids = await self._ask(partial(self._glimpses.token_ids, node_id, block, most_tokens))
        return None if token_ids is None else NodeTokens(node_id, n_tokens, token_ids)


@asynccontextmanager
async def watching(ask: Ask, glimpses: Glimpses, watch: LiveWatch) -> AsyncGenerator[LiveWatch]:
    """Nothing is noted any more behind the block, and nothing kept."""
    try:
        yield watch
    finally:
        with suppress(EngineStopped):
            await asyncio.shield(asyncio.ensure_future(ask(glimpses.close)))
