"""Runs a request on an engine without a server, and yields its events."""

import asyncio
from collections.abc import AsyncGenerator

from engine.api import Engine
from engine.values.output import OutputEvent
from engine.values.request import Request


class EventQueue:
    """An EventSink for one request, whose events one task reads."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[OutputEvent | BaseException] = asyncio.Queue()

    def put(self, event: OutputEvent) -> None:
        self._queue.put_nowait(event)

    def fail(self, error: BaseException) -> None:
        self._queue.put_nowait(error)

    async def get(self) -> OutputEvent:
        """The next event. Raises the error with which the request was refused."""
        taken = await self._queue.get()
        if isinstance(taken, BaseException):
            raise taken
        return taken


async def events_of(engine: Engine, request: Request) -> AsyncGenerator[OutputEvent, None]:
    """Submit a request, and yield its events. Closing the iterator, or cancelling the task that
    reads it, aborts the request. Raises what the engine raises.
    """
    queue = EventQueue()
    submission = engine.generate(request, queue)
    try:
        n_live = request.n
        while n_live:
            event = await queue.get()
            n_live -= event.finish_reason is not None
            yield event
    finally:
        submission.end()
