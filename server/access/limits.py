"""The limits of each API key: concurrent requests, requests and tokens a minute."""

import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

from limits import RateLimitItemPerMinute, WindowStats
from limits.aio.storage import MemoryStorage
from limits.aio.strategies import FixedWindowRateLimiter, MovingWindowRateLimiter

from server.access.keys import ApiKey
from server.access.refusals import Reason
from server.record import RequestRecord

CONCURRENCY_RETRY_AFTER_SECONDS = 1


class LimitReached(Exception):
    """A limit is reached. The text names it, for the client."""

    def __init__(self, reason: Reason, limit: str, retry_after_seconds: int) -> None:
        super().__init__(f"The limit of this API key is {limit}.")
        self.reason = reason
        self.retry_after_seconds = retry_after_seconds


class Limit(Protocol):
    """One limit of one key. Belongs to one event loop."""

    def held(self, record: RequestRecord) -> AbstractAsyncContextManager[None]:
        """Count a request, while it lasts or by the minute. Raises LimitReached."""
        ...


class Concurrency:
    def __init__(self, most: int) -> None:
        self._most = most
        self._running = 0

    @asynccontextmanager
    async def held(self, record: RequestRecord) -> AsyncIterator[None]:
        if self._running >= self._most:
            limit = f"{self._most} requests at a time"
            raise LimitReached(Reason.CONCURRENCY, limit, CONCURRENCY_RETRY_AFTER_SECONDS)
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1


class TokensPerMinute:
    """The tokens of a request are known at its end, so it passes while any are left.

    The window is fixed: it is one counter, which may exceed the limit. A moving window would keep
    an entry for each token.
    """

    def __init__(self, most: int) -> None:
        self._item = RateLimitItemPerMinute(most)
        self._window = FixedWindowRateLimiter(MemoryStorage())

    @asynccontextmanager
    async def held(self, record: RequestRecord) -> AsyncIterator[None]:
        if not await self._window.test(self._item):
            stats = await self._window.get_window_stats(self._item)
            limit = f"{self._item.amount} tokens a minute"
            raise LimitReached(Reason.TOKENS, limit, _seconds_until(stats))
        try:
            yield
        finally:
            if record.tokens:
                await self._window.hit(self._item, cost=record.tokens)


class RequestsPerMinute:
    def __init__(self, most: int) -> None:
        self._item = RateLimitItemPerMinute(most)
        self._window = MovingWindowRateLimiter(MemoryStorage())

    @asynccontextmanager
    async def held(self, record: RequestRecord) -> AsyncIterator[None]:
        if not await self._window.hit(self._item):
            stats = await self._window.get_window_stats(self._item)
            limit = f"{self._item.amount} requests a minute"
            raise LimitReached(Reason.REQUESTS, limit, _seconds_until(stats))
        yield


async def hold(limits: Sequence[Limit], record: RequestRecord) -> None:
    """Count a request against all limits until `record.held` is closed. Raises LimitReached."""
    for limit in limits:
        await record.held.enter_async_context(limit.held(record))


def limits_of(key: ApiKey) -> tuple[Limit, ...]:
    """The key's limits, requests a minute last: it counts only what passes the others."""
    found: list[Limit] = []
    if key.concurrency is not None:
        found.append(Concurrency(key.concurrency))
    if key.tokens_per_minute is not None:
        found.append(TokensPerMinute(key.tokens_per_minute))
    if key.requests_per_minute is not None:
        found.append(RequestsPerMinute(key.requests_per_minute))
    return tuple(found)


def _seconds_until(stats: WindowStats) -> int:
    return max(1, math.ceil(stats.reset_time - time.time()))
