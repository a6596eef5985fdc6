"""Passes snapshots from the engine thread to a worker thread, which renders them."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from time import thread_time
from typing import Any

from engine.api import EngineStopped
from engine.types.picture import CachePicture, NodeTokens
from engine.watching.renderer import Renderer
from engine.watching.snapshot import SnapshotTaker

Ask = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Has a function called between two steps, and gives its result. Raises EngineStopped."""


class LiveWatch:
    """Implements `engine.api.CacheWatch`. For one task at a time."""

    def __init__(
        self,
        ask: Ask,
        snapshots: SnapshotTaker,
        renderer: Renderer,
        versions: Iterator[int],
        requests: Callable[[], int],
    ) -> None:
        self._ask = ask
        self._snapshots = snapshots
        self._renderer = renderer
        self._versions = versions
        self._requests = requests
        self._version = next(versions)

    async def look(self) -> int:
        is_whole = False
        while not is_whole:  # the first time, a large tree takes a few steps
            snapshot = await self._ask(self._snapshots.take)
            is_whole = snapshot.is_whole
            if await asyncio.to_thread(self._renderer.apply, snapshot):
                self._version = next(self._versions)
        return self._version

    async def picture(self) -> CachePicture:
        return await asyncio.to_thread(self._rendered)

    def _rendered(self) -> CachePicture:
        began_seconds = thread_time()
        picture = self._renderer.render(self._version, self._requests())
        return replace(picture, cost_seconds=thread_time() - began_seconds)

    async def node(self, node_id: int, most_tokens: int) -> NodeTokens | None:
        await self.look()
        found = self._renderer.first_block(node_id)
        if found is None:
            return None
        n_tokens, block = found
        token_ids = await self._ask(partial(self._snapshots.token_ids, node_id, block, most_tokens))
        return None if token_ids is None else NodeTokens(node_id, n_tokens, token_ids)


@asynccontextmanager
async def watching(
    ask: Ask, snapshots: SnapshotTaker, watch: LiveWatch
) -> AsyncGenerator[LiveWatch]:
    """Ends the watch with the block: no changes are noted any more."""
    try:
        yield watch
    finally:
        with suppress(EngineStopped):
            await asyncio.shield(asyncio.ensure_future(ask(snapshots.close)))
