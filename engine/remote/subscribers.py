"""Hands events to the event loops that wait for them."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable
from typing import TypeAlias

from engine.api import InvalidRequest
from engine.values.output import FinishReason, OutputEvent, Usage
from engine.values.request import Request

logger = logging.getLogger(__name__)

EventQueue: TypeAlias = "asyncio.Queue[OutputEvent | None]"
"""The events of one request; None when the engine has stopped."""

Batch: TypeAlias = list[tuple[EventQueue, OutputEvent | None]]


class Subscribers:
    """Delivers events to the event loops that wait for them, with one wake-up a step for each."""

    def __init__(self) -> None:
        self._queues: dict[str, tuple[asyncio.AbstractEventLoop, EventQueue]] = {}

    def add(self, request_id: str) -> EventQueue:
        """Raises InvalidRequest when the id has been taken."""
        if request_id in self._queues:
            raise InvalidRequest(f"a request with id {request_id} is being served", "id")
        queue: EventQueue = asyncio.Queue()
        self._queues[request_id] = asyncio.get_running_loop(), queue
        return queue

    def remove(self, request_id: str) -> None:
        self._queues.pop(request_id, None)

    def deliver(self, events: list[OutputEvent]) -> None:
        batches: defaultdict[asyncio.AbstractEventLoop, Batch] = defaultdict(list)
        for event in events:
            loop, queue = self._queues.get(event.request_id, (None, None))
            if loop is not None and queue is not None:
                batches[loop].append((queue, event))
        for loop, batch in batches.items():
            _hand_over(loop, batch)

    def end(self) -> None:
        """No more events will come: wake all that wait for some."""
        for loop, queue in tuple(self._queues.values()):
            _hand_over(loop, [(queue, None)])


def _hand_over(loop: asyncio.AbstractEventLoop, batch: Batch) -> None:
    try:
        loop.call_soon_threadsafe(_put_all, batch)
    except RuntimeError:  # the event loop has been closed: nobody waits any more
        logger.debug("dropped %d events of a closed event loop", len(batch))


def _put_all(batch: Batch) -> None:
    for queue, event in batch:
        queue.put_nowait(event)


def last_events(request: Request, live: Iterable[int]) -> list[OutputEvent]:
    """One terminal event for each sequence that a stopped loop leaves behind."""
    return [
        OutputEvent(
            request_id=request.id,
            index=index,
            finish_reason=FinishReason.ERROR,
            usage=Usage(len(request.prompt), 0, 0),
            error="the engine has stopped",
        )
        for index in live
    ]
