"""All middleware of the application, as the settings ask for it."""

import math
from collections.abc import Callable, Mapping

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from server.access.hosts import Hosts
from server.access.keys import ApiKey
from server.access.middleware import HostCheck, KeyAuth, KeyLimits, SameOrigin, SingleHeaders
from server.access.origins import Origins
from server.access.refusals import Refusals
from server.gateway import Errors, RequestLog, TimeLimit
from server.http.request_limits import BodyBudget, ConnectionUse, RequestLimits
from server.http.unsent import UnsentBudget
from server.metrics.metrics import HttpAnswers
from server.settings import Settings

NAMESPACES: Mapping[str, Callable[[ApiKey], str]] = {
    "shared": lambda key: "",
    "key": lambda key: key.name,
}
"""By the setting `cache_namespace`: whose requests share what is cached."""

METHODS = ("GET", "HEAD", "POST", "DELETE")
READABLE_HEADERS = ("X-Request-Id", "Request-Id", "Retry-After")


def middleware(
    settings: Settings, answers: HttpAnswers, unsent: UnsentBudget, refusals: Refusals
) -> list[Middleware]:
    """Outermost first. Errors are answered inside CORS: a web page must be able to read them."""
    timeout_seconds = settings.request_timeout_seconds or math.inf
    return [
        Middleware(RequestLog, answers=answers, timeout_seconds=timeout_seconds),
        Middleware(ConnectionUse),
        *cors(settings),
        Middleware(Errors),
        Middleware(TimeLimit),
        Middleware(RequestLimits, bodies=_bodies(settings), unsent=unsent),
        *access_control(settings, refusals),
    ]


def _bodies(settings: Settings) -> BodyBudget:
    return BodyBudget(
        settings.max_body_bytes, settings.max_total_body_bytes, settings.body_timeout_seconds
    )


def access_control(settings: Settings, refusals: Refusals) -> list[Middleware]:
    """API keys, or without keys the checks that keep web pages from using the daemon."""
    if settings.keys:
        namespace_of = NAMESPACES[settings.cache_namespace]
        return [
            Middleware(SingleHeaders),
            Middleware(KeyAuth, keys=settings.keys, namespace_of=namespace_of, refusals=refusals),
            Middleware(KeyLimits, keys=settings.keys, refusals=refusals),
        ]
    return [
        Middleware(SingleHeaders),
        Middleware(SameOrigin, origins=Origins(settings.cors_origin), refusals=refusals),
        Middleware(HostCheck, hosts=Hosts(settings.host, settings.allowed_host), refusals=refusals),
    ]


def cors(settings: Settings) -> list[Middleware]:
    """CORS headers for the pages of `cors_origin`, if any. Pages send their key themselves: there
    are no credentials in the sense of CORS.
    """
    if not settings.cors_origin:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origin_regex=Origins(settings.cors_origin).pattern,
            allow_methods=METHODS,
            allow_headers=("*",),
            expose_headers=READABLE_HEADERS,
            allow_private_network=True,  # public pages, and a daemon in their visitor's network
        )
    ]
