"""The middleware of access control: each raises an ApiError, or passes the request on."""

from collections.abc import Callable, Mapping

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from server.access.areas import is_limited, needed_role
from server.access.hosts import Hosts
from server.access.keys import ApiKey, Keyring, Role
from server.access.limits import Limit, LimitReached, hold, limits_of
from server.access.origins import Origins, is_own
from server.access.refusals import Reason, Refusals
from server.errors import ApiError, busy, invalid
from server.http.http_middleware import HttpMiddleware
from server.record import RequestRecord, request_record

SINGLE_HEADERS = ("host", "origin")
"""Headers that access depends on. Of two, a proxy may have checked the other one."""


class SingleHeaders(HttpMiddleware):
    """Refuses a request that names two hosts (RFC 9112, section 3.2) or two origins."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        for name in SINGLE_HEADERS:
            if len(headers.getlist(name)) > 1:
                raise invalid(f"A request has one {name.title()} header at most.", None)
        await self.app(scope, receive, send)


class KeyAuth(HttpMiddleware):
    """Requires an API key unless the path is open, and sets the record's key and client."""

    def __init__(
        self,
        app: ASGIApp,
        keys: Keyring,
        namespace_of: Callable[[ApiKey], str],
        refusals: Refusals,
    ) -> None:
        super().__init__(app)
        self._keys = keys
        self._namespace_of = namespace_of
        self._refusals = refusals

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        role = needed_role(scope["path"])
        if role is not None:
            key = self._key(scope)
            self._note(key, request_record(scope))
            self._check_role(key, role)
        await self.app(scope, receive, send)

    def _key(self, scope: Scope) -> ApiKey:
        headers = dict(scope["headers"])
        bearer = self._keys.find(_bearer_token(headers.get(b"authorization", b"")))
        key = self._keys.find(headers.get(b"x-api-key", b"").strip(b" \t")) or bearer
        if key is None:
            self._refusals.count(Reason.NO_KEY)
            raise ApiError(
                401,
                "A valid API key is needed: send it as 'Authorization: Bearer KEY' or "
                "'x-api-key: KEY'.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return key

    def _check_role(self, key: ApiKey, role: Role) -> None:
        if role is Role.ADMIN and key.role is not Role.ADMIN:
            self._refusals.count(Reason.ROLE, key.name)
            raise ApiError(403, "This needs an admin's API key.", code="admin_key_needed")

    def _note(self, key: ApiKey, record: RequestRecord) -> None:
        record.key = key.name
        record.has_admin_key = key.role is Role.ADMIN
        record.cache_namespace = self._namespace_of(key)
        record.allowed_models = None if key.models is None else frozenset(key.models)
        if self._keys.tells_apart:
            record.client = key.name


def _bearer_token(authorization: bytes) -> bytes:
    """What follows the scheme, whose case and spaces do not matter (RFC 9110, section 11)."""
    scheme, _, token = authorization.strip(b" \t").partition(b" ")
    return token.lstrip(b" ") if scheme.lower() == b"bearer" else b""


class KeyLimits(HttpMiddleware):
    """Applies the limits of each key."""

    def __init__(self, app: ASGIApp, keys: Keyring, refusals: Refusals) -> None:
        super().__init__(app)
        self._limits: Mapping[str, tuple[Limit, ...]] = {
            key.name: limits_of(key) for key in keys.keys
        }
        self._refusals = refusals

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not is_limited(scope["method"], scope["path"]):
            await self.app(scope, receive, send)
            return
        record = request_record(scope)
        try:
            await hold(self._limits[record.key], record)
        except LimitReached as reached:
            self._refusals.count(reached.reason, record.key)
            raise busy(
                429, str(reached), "rate_limit_exceeded", reached.retry_after_seconds
            ) from None
        await self.app(scope, receive, send)


class SameOrigin(HttpMiddleware):
    """Refuses what a browser sends on behalf of another site.

    A web page may post to localhost without asking; its browser then says where it comes from.
    """

    def __init__(self, app: ASGIApp, origins: Origins, refusals: Refusals) -> None:
        super().__init__(app)
        self._origins = origins
        self._refusals = refusals

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        host = headers.get("host", "")
        if origin is not None and not self._may_ask(origin, scope["scheme"], host):
            self._refusals.count(Reason.ORIGIN)
            message = "Requests from other web sites are refused, but for those of cors_origin."
            raise ApiError(403, message, code="foreign_origin")
        await self.app(scope, receive, send)

    def _may_ask(self, origin: str, scheme: str, host: str) -> bool:
        return is_own(origin, scheme, host) or self._origins.has(origin)


class HostCheck(HttpMiddleware):
    """Refuses requests whose Host header names another host. HTTP/1.0, which no browser speaks, may
    have none.
    """

    def __init__(self, app: ASGIApp, hosts: Hosts, refusals: Refusals) -> None:
        super().__init__(app)
        self._hosts = hosts
        self._refusals = refusals

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host")
        is_old = host is None and scope["http_version"] == "1.0"
        if host is None and not is_old:
            raise ApiError(400, "HTTP/1.1 asks for a Host header (RFC 9112, section 3.2)")
        if not is_old and not self._hosts.has(host or ""):
            self._refusals.count(Reason.HOST)
            message = (
                "The Host header is none of this machine's names. While there are no API keys, "
                "other names must be in allowed_host."
            )
            raise ApiError(403, message, code="foreign_host")
        await self.app(scope, receive, send)
