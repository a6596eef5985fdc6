"""A client of a daemon's `/admin` routes, and which of the daemon's models a command means."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeVar
from urllib.parse import urlencode

import httpx
import typer
from pydantic import TypeAdapter, ValidationError

from engine.values.stats import RecentHits
from server.admin_schema import (
    CacheStatsResponse,
    CacheTree,
    ClearResponse,
    LiveRequest,
    LiveRequests,
    PooledModelInfo,
    PooledModels,
    ProbeResponse,
    State,
)
from server.terminal.client import (
    UNLIMITED,
    Endpoint,
    EventStream,
    fetch,
    http_client,
    open_response,
    parse_url,
    shortened,
)
from server.terminal.console import NotFound, NotLoaded, TerminalError, printable

AnswerT = TypeVar("AnswerT")

TIMEOUT = httpx.Timeout(30.0, connect=2.0)  # some answers wait for the end of the running step

NO_MODELS = (
    "this server lists no models at /admin/models: it is no Rootstock daemon, or an older one"
)
NO_PICTURES = (
    "this daemon shows no picture of its cache: it is an older one, or runs with --no-dashboard"
)

LOADED = frozenset({State.READY, State.DRAINING})
"""The states in which a model has a cache to look into."""


@dataclass(frozen=True, slots=True)
class Admin:
    """A client of one daemon. A method that takes a model's name means the daemon's first model
    without one. Every method raises TerminalError.
    """

    http: httpx.Client

    def cache_stats(self, model: str | None = None) -> CacheStatsResponse:
        """The counters of a loaded model's cache."""
        return self._fetch(CacheStatsResponse, "GET", _path("cache/stats", model=model))

    def clear_cache(
        self, tiers: str | None = None, what: str | None = None, model: str | None = None
    ) -> ClearResponse:
        """Clear the cache of a model, or of each. `tiers` and `what` are texts with commas; None is
        both tiers, and the KV alone.
        """
        path = _path("cache/clear", tiers=tiers, what=what, model=model)
        return self._fetch(ClearResponse, "POST", path)

    def probe_cache(self, body: dict[str, object]) -> ProbeResponse:
        """The number of a prompt's tokens that are cached."""
        return self._fetch(ProbeResponse, "POST", "cache/probe", body)

    def models(self) -> PooledModels:
        """All models of the daemon, and their memory."""
        with _explained(NO_MODELS):
            return self._fetch(PooledModels, "GET", "models")

    def requests(self) -> list[LiveRequest]:
        """The requests that run or wait."""
        return self._fetch(LiveRequests, "GET", "requests").requests

    def picture(self, model: str | None = None) -> CacheTree:
        """The cache as it is now."""
        with _explained(NO_PICTURES):
            return self._fetch(CacheTree, "GET", _path("cache/tree", model=model))

    def pictures(self, model: str | None = None) -> Generator[CacheTree]:
        """Yield the cache each time it has changed, until the daemon ends."""
        stream, path = EventStream(), _path("cache/tree/stream", model=model)
        with (
            _explained(NO_PICTURES),
            open_response(self.http, "GET", path, timeout=UNLIMITED) as response,
        ):
            for piece in response.iter_bytes():
                for data in stream.feed(piece):
                    yield _parse(CacheTree, data)

    def change(self, action: Literal["load", "unload"], model: str) -> PooledModelInfo:
        """Load or unload the model, and wait until it is ready, or its memory free."""
        path = _path(f"models/{action}", model=model)
        with open_response(self.http, "POST", path, timeout=UNLIMITED) as response:
            return _parse(PooledModelInfo, response.read())

    def _fetch(self, model: type[AnswerT], method: str, path: str, body: object = None) -> AnswerT:
        return _parse(model, fetch(self.http, method, path, body))


@contextmanager
def admin_client(endpoint: Endpoint) -> Iterator[Admin]:
    """A client of the daemon whose /v1 is at the endpoint. Raises TerminalError for an invalid
    URL.
    """
    root = str(parse_url(endpoint.base_url)).rstrip("/").removesuffix("/v1")
    with http_client(Endpoint(f"{root}/admin", endpoint.api_key), TIMEOUT) as http:
        yield Admin(http)


def loaded_model(daemon: Admin, name: str | None) -> str:
    """The name of the model to look into: the given one, or else the first that is loaded.

    If that is not the daemon's first model, a line on standard error names it. Raises NotLoaded
    where the model, or every model, is not loaded. A name that the daemon does not list is returned
    as it is: the daemon refuses it.
    """
    models = daemon.models().models
    loaded = [model.id for model in models if model.state in LOADED]
    if name is not None:
        named = next((model for model in models if name in _names(model)), None)
        if named is None or named.id in loaded:
            return name
        hint = f"; loaded: {', '.join(loaded)}" if loaded else _how_to_load([named])
        raise NotLoaded(f"{name} {named.state.words}{hint}")
    if not loaded:
        raise NotLoaded(f"no model is loaded{_how_to_load(models)}")
    first = models[0]
    if first.id != loaded[0]:
        note = f"{first.id} {first.state.words}; showing {loaded[0]}"
        typer.echo(printable(note), err=True)
    return loaded[0]


def recent_text(recent: Sequence[RecentHits]) -> str:
    """The share of prompt tokens found in the cache, such as `75.0% in 5 min, 60.1% in 15 min`.
    Windows without prompts are left out.
    """
    return ", ".join(
        f"{hits.hit_tokens / hits.queried_tokens:.1%} in {hits.seconds // 60} min"
        for hits in recent
        if hits.queried_tokens
    )


def _names(model: PooledModelInfo) -> set[str]:
    names = {model.id, *model.aliases}
    return names | {f"{name}:{adapter}" for name in names for adapter in model.adapters}


def _how_to_load(models: list[PooledModelInfo]) -> str:
    if len(models) == 1:
        return f"; `rootstock load {models[0].id}` loads it"
    return f"; `rootstock load NAME` loads one of {', '.join(model.id for model in models)}"


def _path(path: str, **query: str | None) -> str:
    """The path with the query parameters that are not None."""
    given = {name: value for name, value in query.items() if value is not None}
    return f"{path}?{urlencode(given)}" if given else path


def _parse(model: type[AnswerT], content: bytes) -> AnswerT:
    try:
        return TypeAdapter(model).validate_json(content)
    except ValidationError:
        raise TerminalError(f"not an answer of a Rootstock daemon: {shortened(content)}") from None


@contextmanager
def _explained(text: str) -> Iterator[None]:
    """Replace the error for a path that the server does not have."""
    try:
        yield
    except NotFound:
        raise TerminalError(text) from None
