"""A client of a daemon's `/admin` routes."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlencode

import httpx
from pydantic import BaseModel, ValidationError

from server.schemas.admin import LiveRequest, LiveRequests
from server.schemas.cache import CacheStatsResponse, ClearResponse, ProbeResponse
from server.schemas.cache_tree import CacheTree
from server.schemas.pool import PooledModelInfo, PooledModels
from server.terminal.client.http import PATIENT, Endpoint, answer, ask, connection
from server.terminal.client.sse import EventStream
from server.terminal.client.wire import one_line
from server.terminal.errors import NotFound, TerminalError

Answer = TypeVar("Answer", bound=BaseModel)

TIMEOUT = httpx.Timeout(30.0, connect=2.0)  # some answers wait for the end of the running step


@dataclass(frozen=True, slots=True)
class Admin:
    """A client of one daemon, of whose models a method has the first unless it is given another's
    name. Every method raises TerminalError.
    """

    http: httpx.Client

    def cache_stats(self, model: str | None = None) -> CacheStatsResponse:
        return self._asked(CacheStatsResponse, "GET", _path("cache/stats", model=model))

    def clear_cache(
        self, tiers: str | None = None, what: str | None = None, model: str | None = None
    ) -> ClearResponse:
        path = _path("cache/clear", tiers=tiers, what=what, model=model)
        return self._asked(ClearResponse, "POST", path)

    def probe_cache(self, body: dict[str, object]) -> ProbeResponse:
        return self._asked(ProbeResponse, "POST", "cache/probe", body)

    def models(self) -> PooledModels:
        try:
            return self._asked(PooledModels, "GET", "models")
        except NotFound:
            raise TerminalError(
                "this server lists no models at /admin/models: it is no Rootstock daemon, or an "
                "older one"
            ) from None

    def load(self, model: str) -> PooledModelInfo:
        """Waits until it is loaded."""
        return self._acted("load", model)

    def unload(self, model: str) -> PooledModelInfo:
        """Waits until it is gone."""
        return self._acted("unload", model)

    def requests(self) -> list[LiveRequest]:
        return self._asked(LiveRequests, "GET", "requests").requests

    def picture(self, model: str | None = None) -> CacheTree:
        """The cache as it is now."""
        with _pictures_needed():
            return self._asked(CacheTree, "GET", _path("cache/tree", model=model))

    def pictures(self, model: str | None = None) -> Generator[CacheTree]:
        """The cache, each time it has changed, for as long as the daemon runs."""
        stream, path = EventStream(), _path("cache/tree/stream", model=model)
        with (
            _pictures_needed(),
            answer(self.http, "GET", path, timeout=PATIENT) as response,
        ):
            for piece in response.iter_bytes():
                for data in stream.feed(piece):
                    yield _read(CacheTree, data)

    def _acted(self, action: str, model: str) -> PooledModelInfo:
        path = _path(f"models/{action}", model=model)
        with answer(self.http, "POST", path, timeout=PATIENT) as response:
            return _read(PooledModelInfo, response.read())

    def _asked(self, model: type[Answer], method: str, path: str, body: object = None) -> Answer:
        return _read(model, ask(self.http, method, path, body))


def _path(path: str, **query: str | None) -> str:
    """With what is given of the query."""
    given = {name: value for name, value in query.items() if value is not None}
    return f"{path}?{urlencode(given)}" if given else path


def _read(model: type[Answer], content: bytes) -> Answer:
    try:
        return model.model_validate_json(content)
    except ValidationError:
        raise TerminalError(f"not what a Rootstock daemon says: {one_line(content)}") from None


@contextmanager
def _pictures_needed() -> Iterator[None]:
    try:
        yield
    except NotFound:
        raise TerminalError(
            "this daemon shows no picture of its cache: it is an older one, or runs with "
            "--no-dashboard"
        ) from None


@contextmanager
def administered(endpoint: Endpoint) -> Iterator[Admin]:
    """The daemon whose /v1 is the endpoint."""
    root = endpoint.base_url.rstrip("/").removesuffix("/v1")
    with connection(Endpoint(f"{root}/admin", endpoint.api_key), TIMEOUT) as http:
        yield Admin(http)
