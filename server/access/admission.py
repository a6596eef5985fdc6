"""Decides which requests are admitted: by API keys with their roles and limits, or by hosts and
origins.
"""

import math
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from enum import StrEnum

from limits import RateLimitItemPerMinute
from limits.aio.storage import MemoryStorage
from limits.aio.strategies import FixedWindowRateLimiter, MovingWindowRateLimiter, RateLimiter
from starlette.datastructures import Headers
from starlette.types import Scope

from server.access.keys import ApiKey, Keyring, Role
from server.access.web import Hosts, Origins, is_own
from server.errors import ApiError, invalid
from server.record import Principal, RequestRecord

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


OPEN_PATHS = frozenset(
    {"/health", "/load", "/metrics", "/openapi.json", "/version", "/api/version", "/", "/docs"}
)
"""Monitoring, and the pages, which ask for a key themselves. All other paths, known or not, need a
key.
"""
PAGE_FILES = "/dashboard/"

ADMIN = "/admin"
ADMIN_PATHS = frozenset({ADMIN, "/api/pull", "/api/delete"})
CANCELLATION = "/cancel"

SINGLE_HEADERS = ("host", "origin")
"""Headers that access depends on. Of two, a proxy may have checked the other one."""


class Reason(StrEnum):
    """Why a request was refused, as `/metrics` names it; that of a key's limit is the limit."""

    HOST = "foreign_host"
    ORIGIN = "foreign_origin"
    NO_KEY = "invalid_key"
    ROLE = "role"


def needed_role(path: str) -> Role | None:
    """The role whose key the path needs; None where it is open."""
    if path in OPEN_PATHS or path.startswith(PAGE_FILES):
        return None
    return Role.ADMIN if path in ADMIN_PATHS or path.startswith(f"{ADMIN}/") else Role.USER


def is_limited(method: str, path: str) -> bool:
    """Whether a request counts against its key's limits: POST requests do, but for cancellation."""
    is_users = needed_role(path) is Role.USER
    return method == "POST" and is_users and not path.endswith(CANCELLATION)


class Policy:
    """Decides who sends a request and whether it is let in. Belongs to one event loop.

    `refusals` counts refused requests by reason and by the key's name, which the operator chose:
    clients cannot add series to `/metrics`. The name is empty where no key was found.
    """

    def __init__(
        self, keys: Keyring, hosts: Hosts, origins: Origins, *, has_namespaces: bool
    ) -> None:
        """`has_namespaces`: each key has a prefix cache of its own."""
        self._keys = keys or None  # None: every request may do everything
        self._hosts = hosts
        self._origins = origins
        self._has_namespaces = has_namespaces
        self._limits: Mapping[str, KeyLimits] = {key.name: KeyLimits(key) for key in keys.keys}
        # Those without a key are there from the start: a rate needs a value to rise from.
        self.refusals = {(str(reason), ""): 0 for reason in (Reason.HOST, Reason.ORIGIN)}
        self.refusals[Reason.NO_KEY, ""] = 0

    def identify(self, scope: Scope) -> Principal:
        """The sender of a request: its key, or where none is needed its address.

        Raises ApiError: 401 without a valid key, 400 where the request names two hosts (RFC 9112,
        section 3.2) or two origins.
        """
        headers = Headers(scope=scope)
        for name in SINGLE_HEADERS:
            if len(headers.getlist(name)) > 1:
                raise invalid(f"A request has one {name.title()} header at most.", None)
        address = peer_address(scope)
        if self._keys is None or needed_role(scope["path"]) is None:
            return Principal(address)
        key = self._key(self._keys, scope)
        return Principal(
            client=key.name if self._keys.identifies_clients else address,
            key=key.name,
            is_admin=key.role is Role.ADMIN,
            namespace=key.name if self._has_namespaces else "",
            allowed_models=None if key.models is None else frozenset(key.models),
        )

    async def admit(self, record: RequestRecord, scope: Scope) -> None:
        """Let in a request of `record.principal`, and count it against the limits of its key until
        `record.held` is closed. Raises ApiError: 403, 429, and 400 without a Host header.
        """
        if self._keys is None:
            self._check_origin(scope)
            self._check_host(scope)
            return
        principal, path = record.principal, scope["path"]
        if needed_role(path) is Role.ADMIN and not principal.is_admin:
            self._count(Reason.ROLE, principal.key)
            raise ApiError(403, "This needs an admin's API key.", code="admin_key_needed")
        if is_limited(scope["method"], path):
            try:
                await record.held.enter_async_context(self._limits[principal.key].hold(record))
            except LimitReached as reached:
                self._count(reached.limit, principal.key)
                raise

    def _key(self, keys: Keyring, scope: Scope) -> ApiKey:
        headers = dict(scope["headers"])
        bearer = keys.find(_bearer_token(headers.get(b"authorization", b"")))
        key = keys.find(headers.get(b"x-api-key", b"").strip(b" \t")) or bearer
        if key is None:
            self._count(Reason.NO_KEY)
            raise ApiError(
                401,
                "A valid API key is needed: send it as 'Authorization: Bearer KEY' or "
                "'x-api-key: KEY'.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return key

    def _check_origin(self, scope: Scope) -> None:
        """Refuse requests that a browser sends for a page of another site. Those for images and
        scripts have no Origin, but Sec-Fetch-Site.
        """
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        if origin is None:
            is_allowed = headers.get("sec-fetch-site") != "cross-site" or _is_visit(scope, headers)
        else:
            is_allowed = is_own(origin, scope["scheme"], headers.get("host", ""))
            is_allowed = is_allowed or self._origins.has(origin)
        if not is_allowed:
            self._count(Reason.ORIGIN)
            message = "Requests from other web sites are refused, except from cors_origin."
            raise ApiError(403, message, code="foreign_origin")

    def _check_host(self, scope: Scope) -> None:
        """Refuse a Host header that names another host. HTTP/1.0, which no browser speaks, may have
        none.
        """
        host = Headers(scope=scope).get("host")
        if host is None and scope["http_version"] == "1.0":
            return
        if host is None:
            raise ApiError(400, "HTTP/1.1 requires a Host header (RFC 9112, section 3.2)")
        if not self._hosts.has(host):
            self._count(Reason.HOST)
            message = (
                "The Host header is none of this machine's names. While there are no API keys, "
                "other names must be in allowed_host."
            )
            raise ApiError(403, message, code="foreign_host")

    def _count(self, reason: str, key: str = "") -> None:
        self.refusals[reason, key] = self.refusals.get((reason, key), 0) + 1


def peer_address(scope: Scope) -> str:
    """The address of the peer, without its port. Empty where there is no socket."""
    peer = scope.get("client")
    return str(peer[0]) if peer else ""


def _is_visit(scope: Scope, headers: Headers) -> bool:
    """Whether a browser opens the page in a tab of its own, as after a click on a link."""
    is_page = headers.get("sec-fetch-mode") == "navigate" and (
        headers.get("sec-fetch-dest") == "document"
    )
    return is_page and scope["method"] in ("GET", "HEAD")


def _bearer_token(authorization: bytes) -> bytes:
    """The credentials after the scheme, whose case and spaces do not matter (RFC 9110, section
    11).
    """
    scheme, _, token = authorization.strip(b" \t").partition(b" ")
    return token.lstrip(b" ") if scheme.lower() == b"bearer" else b""
