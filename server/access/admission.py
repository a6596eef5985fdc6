"""Decides which requests are admitted: by API keys with their roles and limits, or by hosts and
origins.
"""

import ipaddress
import math
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from enum import StrEnum

from limits import RateLimitItemPerMinute
from limits.aio.storage import MemoryStorage
from limits.aio.strategies import FixedWindowRateLimiter, MovingWindowRateLimiter, RateLimiter
from starlette.datastructures import Headers
from starlette.types import Scope

from server.access.hosts import BELOW, LABEL, NAME
from server.access.keys import ApiKey, Keyring, Role
from server.errors import ApiError, invalid, memory_short
from server.record import Principal, RequestRecord

PRIVATE_DOMAINS = "localhost|local|internal"
"""Never in the public DNS: RFC 6761, section 6.3; RFC 6762, section 3; ICANN, 29 July 2024."""

PRIVATE_NAME = re.compile(rf"localhost|(?:{LABEL}\.)+(?:{PRIVATE_DOMAINS})")
HEADER = re.compile(r"(?:\[(?P<v6>[^\]]*)\]|(?P<name>[^:\[\]]*))(?::[0-9]{0,5})?")

_HOST = r"(?P<name>[^\s:/@?#\[\]]+|\[[0-9a-fA-F:.]+\])(?::(?P<port>[0-9]{1,5}))?"
_HOST_HEADER = re.compile(_HOST)
_WEB_ORIGIN = re.compile(rf"(?P<scheme>https?)://{_HOST}")
_DEFAULT_PORTS = {"http": 80, "https": 443}

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Hosts:
    """The names of this daemon, as Host headers have them, with or without a port.

    Loopback addresses and private names are always among them; so are `listening` (where that is
    the unspecified address, every address) and `allowed`, in which `*.example.org` is every name
    below example.org. An address is safe from rebinding: only a program on it can serve a page.
    """

    def __init__(self, listening: str, allowed: Sequence[str] = ()) -> None:
        names = [_shortest(name.lower().strip("[]")) for name in (listening, *allowed)]
        self._names = frozenset(name for name in names if name)
        self._domains = tuple(name.removeprefix("*") for name in names if name.startswith(BELOW))
        address = _address(names[0])
        self._has_every_address = address is not None and address.is_unspecified

    def has(self, header: str) -> bool:
        """Whether a Host header names this daemon."""
        parts = HEADER.fullmatch(header.lower())
        if parts is None:
            return False
        host = _shortest(parts["name"] if parts["v6"] is None else parts["v6"])
        if host in self._names:
            return True
        if address := _address(host):
            return address.is_loopback or self._has_every_address
        is_below = bool(NAME.fullmatch(host)) and host.endswith(self._domains)
        return is_below or bool(PRIVATE_NAME.fullmatch(host))


class Origins:
    """Web origins whose pages may send requests: as browsers send them, `app://*` and the like, or
    `*`. `pattern` is the regular expression of all of them.
    """

    def __init__(self, allowed: Sequence[str]) -> None:
        patterns = [re.escape(origin).replace(r"\*", ".*") for origin in allowed]
        self.pattern = "|".join(patterns) or "(?!)"

    def has(self, origin: str) -> bool:
        """Whether an Origin header is one of them."""
        return re.fullmatch(self.pattern, origin) is not None


def is_own(origin: str, scheme: str, host: str) -> bool:
    """Whether an Origin header names this daemon, which was reached by `scheme` and the Host header
    `host`. Scheme, name and port must agree. `null` and origins of other schemes name none.

    Where the Host has no port an https page agrees with plain HTTP: a proxy in front of the daemon
    may end TLS without saying so.
    """
    page, own = _WEB_ORIGIN.fullmatch(origin), _HOST_HEADER.fullmatch(host)
    if page is None or own is None or page["name"].lower() != own["name"].lower():
        return False
    default = _DEFAULT_PORTS[page["scheme"]]
    if int(page["port"] or default) != int(own["port"] or default):
        return False
    return page["scheme"] == scheme or (page["scheme"] == "https" and own["port"] is None)


def _shortest(host: str) -> str:
    """An address as browsers send it, however it was written; a name as it is."""
    return str(_address(host) or host)


def _address(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


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
UNLIMITED_ENDS = ("/cancel", "/render", "/tokenize")
"""The ends of paths that no limit of a key counts: they end work, or are what routers request for
each of a client's requests.
"""

SINGLE_HEADERS = ("host", "origin")
"""Headers that access depends on. Of two, a proxy may have checked the other one."""


class Reason(StrEnum):
    """Why a request was refused, as `/metrics` names it; that of a key's limit is the limit."""

    HOST = "foreign_host"
    ORIGIN = "foreign_origin"
    NO_KEY = "invalid_key"
    ROLE = "role"
    MEMORY = "memory"


def needed_role(path: str) -> Role | None:
    """The role whose key the path needs; None where it is open."""
    if path in OPEN_PATHS or path.startswith(PAGE_FILES):
        return None
    return Role.ADMIN if path in ADMIN_PATHS or path.startswith(f"{ADMIN}/") else Role.USER


def is_limited(method: str, path: str) -> bool:
    """Whether a request counts against its key's limits: POST requests do, except some."""
    is_users = needed_role(path) is Role.USER
    return method == "POST" and is_users and not path.endswith(UNLIMITED_ENDS)


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
        self._closed_for = ""
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

    def close(self, reason: str) -> None:
        """Admit no more requests that models answer, for the reason in a sentence; all again where
        that is empty.
        """
        self._closed_for = reason

    async def admit(self, record: RequestRecord, scope: Scope) -> None:
        """Let in a request of `record.principal`, and count it against the limits of its key until
        `record.held` is closed. Raises ApiError: 403, 429, 400 without a Host header, and 503 while
        none is admitted.
        """
        if self._keys is None:
            self._check_origin(scope)
            self._check_host(scope)
            self._check_open(record, scope)
            return
        principal, path = record.principal, scope["path"]
        if needed_role(path) is Role.ADMIN and not principal.is_admin:
            self._count(Reason.ROLE, principal.key)
            raise ApiError(403, "This needs an admin's API key.", code="admin_key_needed")
        self._check_open(record, scope)
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

    def _check_open(self, record: RequestRecord, scope: Scope) -> None:
        if self._closed_for and is_limited(scope["method"], scope["path"]):
            self._count(Reason.MEMORY, record.principal.key)
            raise memory_short(self._closed_for)

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
