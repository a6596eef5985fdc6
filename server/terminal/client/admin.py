"""A daemon's own routes, under `/admin`."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from server.schemas.admin import (
    CacheStatsResponse,
    ClearResponse,
    LiveRequest,
    LiveRequests,
    ProbeResponse,
)
from server.terminal.client.http import Endpoint, ask, connection
from server.terminal.client.wire import one_line
from server.terminal.errors import TerminalError

Answer = TypeVar("Answer", bound=BaseModel)

TIMEOUT = httpx.Timeout(30.0, connect=2.0)  # some answers wait for the end of the running step


@dataclass(frozen=True, slots=True)
class Admin:
    """One daemon. Every method raises TerminalError."""

    http: httpx.Client

    def cache_stats(self) -> CacheStatsResponse:
        return self._asked(CacheStatsResponse, "GET", "cache/stats")

    def clear_cache(self) -> ClearResponse:
        return self._asked(ClearResponse, "POST", "cache/clear")

    def probe_cache(self, body: dict[str, object]) -> ProbeResponse:
        return self._asked(ProbeResponse, "POST", "cache/probe", body)

    def requests(self) -> list[LiveRequest]:
        return self._asked(LiveRequests, "GET", "requests").requests

    def _asked(self, model: type[Answer], method: str, path: str, body: object = None) -> Answer:
        content = ask(self.http, method, path, body)
        try:
            return model.model_validate_json(content)
        except ValidationError:
            raise TerminalError(f"not what a Rootstock daemon says: {one_line(content)}") from None


@contextmanager
def administered(endpoint: Endpoint) -> Iterator[Admin]:
    """The daemon whose /v1 is the endpoint."""
    root = endpoint.base_url.rstrip("/").removesuffix("/v1")
    with connection(Endpoint(f"{root}/admin", endpoint.api_key), TIMEOUT) as http:
        yield Admin(http)
