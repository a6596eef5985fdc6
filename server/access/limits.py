"""The limits of one API key: concurrent requests, requests and tokens a minute."""

import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from limits import RateLimitItemPerMinute
from limits.aio.storage import MemoryStorage
from limits.aio.strategies import FixedWindowRateLimiter, MovingWindowRateLimiter, RateLimiter

from server.access.keys import ApiKey
from server.errors import ApiError
from server.record import RequestRecord

CONCURRENCY_RETRY_AFTER_SECONDS = 1


class LimitReached(ApiError):
    """429: a limit of the request's key is reached. `limit` is the name of the key's field."""

    def __init__(self, limit: str, most: str, retry_after_seconds: int) -> None:
        super().__init__(
            429,
            f"The limit of this API key is {most}.",
            type="rate_limit_error",
            code="rate_limit_exceeded",
            headers={"Retry-After": str(retry_after_seconds)},
        )
        self.limit = limit


class KeyLimits:
    """Counts the requests of one key. Belongs to one event loop.

    The tokens of a request are known at its end, so it passes while any are left. Their window is
    fixed: it is one counter, which may exceed the limit. A moving window has an entry for each hit,
    which is right for requests alone.
    """

    def __init__(self, key: ApiKey) -> None:
        self._most_at_once = key.concurrency
        self._n_running = 0
        self._requests = self._tokens = None
        if key.requests_per_minute is not None:
            self._requests = _Window(
                "requests", key.requests_per_minute, MovingWindowRateLimiter(MemoryStorage())
            )
        if key.tokens_per_minute is not None:
            self._tokens = _Window(
                "tokens", key.tokens_per_minute, FixedWindowRateLimiter(MemoryStorage())
            )

    @asynccontextmanager
    async def hold(self, record: RequestRecord) -> AsyncIterator[None]:
        """Count a request for as long as the block runs, and `record.tokens` at its end. Raises
        LimitReached.

        Requests a minute are last: only what passes the other limits is counted.
        """
        if self._most_at_once is not None and self._n_running >= self._most_at_once:
            most = f"{self._most_at_once} requests at a time"
            raise LimitReached("concurrency", most, CONCURRENCY_RETRY_AFTER_SECONDS)
        self._n_running += 1
        try:
            if self._tokens is not None:
                await self._tokens.check()
            if self._requests is not None:
                await self._requests.count_one()
            try:
                yield
            finally:
                if self._tokens is not None and record.tokens:
                    await self._tokens.count(record.tokens)
        finally:
            self._n_running -= 1


class _Window:
    """A limit by the minute of `what`, requests or tokens."""

    def __init__(self, what: str, most: int, limiter: RateLimiter) -> None:
        self._what = what
        self._item = RateLimitItemPerMinute(most)
        self._limiter = limiter

    async def check(self) -> None:
        """Raises LimitReached when nothing is left."""
        if not await self._limiter.test(self._item):
            raise await self._reached()

    async def count_one(self) -> None:
        """Raises LimitReached when nothing is left, and counts nothing then."""
        if not await self._limiter.hit(self._item):
            raise await self._reached()

    async def count(self, cost: int) -> None:
        """Count whatever is left."""
        await self._limiter.hit(self._item, cost=cost)

    async def _reached(self) -> LimitReached:
        stats = await self._limiter.get_window_stats(self._item)
        seconds = max(1, math.ceil(stats.reset_time - time.time()))
        most = f"{self._item.amount} {self._what} a minute"
        return LimitReached(f"{self._what}_per_minute", most, seconds)
