"""Responses with `background: true`: made while no client waits."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Annotated, cast

from anyio import CancelScope, Event
from anyio.abc import TaskGroup
from fastapi import Depends, Request

from engine.api import EngineError
from server.activity.tracker import RequestTracker
from server.dialects.base import generate_all
from server.dialects.responses.answer import ResponseStatus
from server.dialects.responses.object import response_state
from server.dialects.responses.store import StoredConversation
from server.dialects.responses.task import ResponsesBuilder
from server.errors import ApiError, busy, to_api_error
from server.http.unsent import UnsentBudget, rendering_bytes
from server.workers import Workers

RETRY_AFTER_SECONDS = 5

log = logging.getLogger("rootstock.responses")


class BackgroundResponses:
    """The background responses in progress. Draining the engine ends them."""

    def __init__(
        self,
        tasks: TaskGroup,
        unsent: UnsentBudget,
        workers: Workers,
        tracker: RequestTracker,
        most: int,
    ) -> None:
        self._tasks = tasks
        self._tracker = tracker
        self._unsent = unsent
        self._workers = workers
        self._most = most
        self._running: dict[tuple[str, str], _Running] = {}

    def start(self, builder: ResponsesBuilder) -> bytes:
        """Start a response, and return it as JSON: `queued`. Raises ApiError (429)."""
        self._check_limit(builder.task.record.client)
        key = builder.task.owner, builder.task.id
        running = _Running(builder, self._unsent, self._workers, self._tracker)
        self._running[key] = running
        self._tasks.start_soon(running.run, lambda: self._running.pop(key))
        return running.json("queued")

    def _check_limit(self, client: str) -> None:
        """Raise ApiError (429) where too many are being made.

        A client may have as many as are free, as in the engine's queue: one client alone gets half,
        and the last free one is left for a client that has none.
        """
        clients = [running.client for running in self._running.values()]
        own, free = clients.count(client), self._most - len(clients)
        if own >= free:
            message = (
                f"{len(clients)} background responses are being made, {own} of them this "
                f"client's, and {self._most} may be (max_background_responses); a client may have "
                f"as many as places are free ({free})."
            )
            raise busy(429, message, "rate_limit_exceeded", RETRY_AFTER_SECONDS)

    def json(self, owner: str, id: str) -> bytes | None:
        """The response, `in_progress`, if it is being made."""
        running = self._running.get((owner, id))
        return None if running is None else running.json("in_progress")

    def input(self, owner: str, id: str) -> StoredConversation | None:
        """What the response is made from, if it is being made."""
        running = self._running.get((owner, id))
        return None if running is None else running.input

    async def cancel(self, owner: str, id: str) -> bool:
        """Whether it was being made. It is stored as `cancelled` unless it has just completed."""
        running = self._running.get((owner, id))
        if running is None:
            return False
        running.scope.cancel()
        await running.ended.wait()
        return True


class _Running:
    def __init__(
        self,
        builder: ResponsesBuilder,
        unsent: UnsentBudget,
        workers: Workers,
        tracker: RequestTracker,
    ) -> None:
        self._builder = builder
        self._tracker = tracker
        self._unsent = unsent
        self._workers = workers
        builder.task.record.slot.release()
        self.client = builder.task.record.client
        self.input = builder.task.context
        self._held = builder.task.record.held.pop_all()  # kept when the request is over
        self.scope = CancelScope()
        self.ended = Event()

    def json(self, status: ResponseStatus) -> bytes:
        return self._builder.task.template.json(response_state(status))

    async def run(self, ended: Callable[[], object]) -> None:
        """Raises nothing: an exception would end all tasks of the daemon's group."""
        try:
            async with self._held:
                await self._generate_and_store()
        except Exception:
            log.exception("response %s has failed and is not stored", self._builder.task.id)
        finally:
            ended()
            self.ended.set()

    async def _generate_and_store(self) -> None:
        try:
            with self.scope, self._builder.task.record.time_limit():
                await self._generate()
            if self.scope.cancelled_caught:
                self._builder.task.store_response(response_state("cancelled"))
        except Exception as error:
            expected = isinstance(error, ApiError | EngineError)
            log.warning("response %s: %s", self._builder.task.id, error, exc_info=not expected)
            self._builder.task.store_response(response_state("failed", error=to_api_error(error)))

    async def _generate(self) -> None:
        builder = self._builder
        with self._unsent.answer(lambda error: None) as unsent:
            choices = await generate_all(builder, unsent, builder.task.record, self._tracker)
            whole = partial(builder.whole, choices)
            await self._workers.run(self.client, rendering_bytes(unsent), whole)


async def _background(request: Request) -> BackgroundResponses:
    return cast(BackgroundResponses, request.app.state.background_responses)


BackgroundDependency = Annotated[BackgroundResponses, Depends(_background)]
