"""Responses with `background: true`: made while no client waits."""

import logging
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, cast

from anyio import CancelScope, Event
from anyio.abc import TaskGroup
from fastapi import Depends, Request

from engine.api import EngineError
from server.activity import RequestTracker
from server.dialects.job import Job, generate_all
from server.dialects.responses.write import ResponseForm
from server.errors import RETRY_AFTER_SECONDS, ApiError, busy, to_api_error
from server.fairness import Budget, Workers
from server.generation.stream import rendering_bytes

log = logging.getLogger("rootstock.responses")


@dataclass(frozen=True, slots=True)
class _Running:
    form: ResponseForm
    held: AsyncExitStack  # what the request holds, kept when the request is over
    scope: CancelScope = field(default_factory=CancelScope)
    ended: Event = field(default_factory=Event)


class BackgroundResponses:
    """The background responses in progress. Draining the engine ends them."""

    def __init__(
        self,
        tasks: TaskGroup,
        output: Budget,
        workers: Workers,
        tracker: RequestTracker,
        most: int,
    ) -> None:
        self._tasks = tasks
        self._output = output
        self._workers = workers
        self._tracker = tracker
        self._most = most
        self._running: dict[tuple[str, str], _Running] = {}

    def start(self, job: Job, form: ResponseForm) -> bytes:
        """Start a response, and return it as JSON: `queued`. Raises ApiError (429)."""
        record = form.record
        self._check_limit(record.client)
        record.body = None  # what is kept of it counts until `held` is closed
        running = _Running(form, record.held.pop_all())
        self._running[record.key, form.id] = running
        self._tasks.start_soon(self._run, job, running)
        return form.json("queued")

    def find(self, owner: str, id: str) -> ResponseForm | None:
        """A response that is being made."""
        running = self._running.get((owner, id))
        return None if running is None else running.form

    async def cancel(self, owner: str, id: str) -> None:
        """End a response that is being made. It is stored as `cancelled` unless it has just
        completed.
        """
        running = self._running.get((owner, id))
        if running is not None:
            running.scope.cancel()
            await running.ended.wait()

    def _check_limit(self, client: str) -> None:
        """Raise ApiError (429) where too many are being made.

        A client may have as many as are free, as in the engine's queue: one client alone gets half,
        and the last free one is left for a client that has none.
        """
        clients = [running.form.record.client for running in self._running.values()]
        own, free = clients.count(client), self._most - len(clients)
        if own >= free:
            message = (
                f"{len(clients)} background responses are being made, {own} of them this "
                f"client's, and {self._most} may be (max_background_responses); a client may have "
                f"as many as places are free ({free})."
            )
            raise busy(429, message, "rate_limit_exceeded", RETRY_AFTER_SECONDS)

    async def _run(self, job: Job, running: _Running) -> None:
        """Raises nothing: an exception would end all tasks of the daemon's group."""
        form = running.form
        try:
            async with running.held:
                await self._generate_and_store(job, form, running.scope)
        except Exception:
            log.exception("response %s has failed and is not stored", form.id)
        finally:
            del self._running[form.record.key, form.id]
            running.ended.set()

    async def _generate_and_store(self, job: Job, form: ResponseForm, scope: CancelScope) -> None:
        record = form.record
        try:
            with (
                scope,
                record.time_limit(),
                self._output.reserve(record.client, record.end) as output,
            ):
                choices = await generate_all(job, output, record, self._tracker)
                whole = partial(job.render, choices, job.usage(choices))
                await self._workers.run(record.client, rendering_bytes(output.n_bytes), whole)
            if scope.cancelled_caught:
                form.stored("cancelled")
        except Exception as error:
            expected = isinstance(error, ApiError | EngineError)
            log.warning("response %s: %s", form.id, error, exc_info=not expected)
            form.stored("failed", error=to_api_error(error))


async def _background(request: Request) -> BackgroundResponses:
    return cast(BackgroundResponses, request.app.state.background_responses)


BackgroundDependency = Annotated[BackgroundResponses, Depends(_background)]
