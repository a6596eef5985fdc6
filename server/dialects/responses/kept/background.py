"""Responses that are made while nobody waits for them."""

import logging
from collections.abc import Callable
from functools import partial

from anyio import CancelScope, Event
from anyio.abc import TaskGroup

from engine.api import EngineError
from server.dialects.responses.envelope import response_news
from server.dialects.responses.exchange import ResponsesExchange
from server.errors import ApiError, busy, to_api_error
from server.generation.events import generate_all
from server.schemas.responses.response import ResponseStatus
from server.transport.unsent import UnsentBudget, rendering_bytes
from server.workers import Workers

RETRY_AFTER_SECONDS = 5

log = logging.getLogger("rootstock.responses")


class BackgroundResponses:
    """Those that are being made. They end with the engine, which whoever stops it drains."""

    def __init__(self, tasks: TaskGroup, unsent: UnsentBudget, workers: Workers, most: int) -> None:
        self._tasks = tasks
        self._unsent = unsent
        self._workers = workers
        self._most = most
        self._running: dict[tuple[str, str], _Running] = {}

    def start(self, exchange: ResponsesExchange) -> bytes:
        """The response as it is at its beginning, as JSON. Raises ApiError (429)."""
        self._check_room(exchange.task.record.client)
        key = exchange.task.owner, exchange.task.id
        self._running[key] = running = _Running(exchange, self._unsent, self._workers)
        self._tasks.start_soon(running.run, lambda: self._running.pop(key))
        return running.json("queued")

    def _check_room(self, client: str) -> None:
        """Raise ApiError (429) where too many are being made.

        A client may have as many as places are free, as in the engine's queue: one alone has half
        of them, and the last one is for who has none.
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
        """The response as it is, if it is being made."""
        running = self._running.get((owner, id))
        return None if running is None else running.json("in_progress")

    async def cancel(self, owner: str, id: str) -> bool:
        """Whether it was being made. It is stored as cancelled, unless it was just complete."""
        running = self._running.get((owner, id))
        if running is None:
            return False
        running.scope.cancel()
        await running.ended.wait()
        return True


class _Running:
    def __init__(self, exchange: ResponsesExchange, unsent: UnsentBudget, workers: Workers) -> None:
        self._exchange = exchange
        self._unsent = unsent
        self._workers = workers
        exchange.task.record.turn.end()
        self.client = exchange.task.record.client
        self._held = exchange.task.record.held.pop_all()  # it goes on when the request is over
        self.scope = CancelScope()
        self.ended = Event()

    def json(self, status: ResponseStatus) -> bytes:
        return self._exchange.task.envelope.json(response_news(status))

    async def run(self, ended: Callable[[], object]) -> None:
        try:
            async with self._held:
                await self._keep()
        finally:
            ended()
            self.ended.set()

    async def _keep(self) -> None:
        try:
            with self.scope, self._exchange.task.record.time_limit():
                await self._generate()
            if self.scope.cancelled_caught:
                self._exchange.task.keep(response_news("cancelled"))
        except Exception as error:
            expected = isinstance(error, ApiError | EngineError)
            log.warning("response %s: %s", self._exchange.task.id, error, exc_info=not expected)
            self._exchange.task.keep(response_news("failed", error=to_api_error(error)))

    async def _generate(self) -> None:
        exchange = self._exchange
        with self._unsent.answer(lambda error: None) as unsent:
            choices = await generate_all(
                exchange.engine,
                exchange.requests,
                exchange.new_choice,
                exchange.meter,
                unsent,
                exchange.task.record,
            )
            whole = partial(exchange.whole, choices)
            await self._workers.run(self.client, rendering_bytes(unsent), whole)
