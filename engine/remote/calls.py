"""What the server asks of an engine's process: one class a call, with what it does there."""

import faulthandler
import logging
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, TypeAlias, get_args

from pydantic import TypeAdapter

from engine.api import CacheWatch
from engine.core.thread import EngineThread
from engine.values.model import ModelCard
from engine.values.picture import CachePicture, NodeTokens
from engine.values.request import Request
from engine.values.settings import LOG_FORMAT, EngineConfig
from engine.values.stats import CacheTier, Cleared, EngineStats, Probed, RequestInfo

HANGS_SECONDS = 3.0
"""Behind the time for requests and for the disk. The server waits for five."""

STDERR = 2  # the descriptor: Python's own stream may be in the midst of a line


class Host(Protocol):
    """The process's end: its engine, the watch while there is one, and what goes to the server."""

    engine: EngineThread
    watch: CacheWatch
    watching: AsyncExitStack
    disk_seconds: float  # that writing the disk cache may take at the end

    async def load(self, config: EngineConfig) -> None: ...


@dataclass(frozen=True, slots=True)
class Load:
    """The first call: whoever makes it hears lines on how it goes."""

    result: ClassVar[Any] = ModelCard
    config: EngineConfig
    log_level: int
    call: Literal["load"] = "load"

    async def run(self, host: Host) -> ModelCard:
        logging.basicConfig(level=self.log_level, format=LOG_FORMAT)
        await host.load(self.config)
        return host.engine.card


@dataclass(frozen=True, slots=True)
class Submit:
    """Returns when the engine has taken the request, whose events come by themselves."""

    result: ClassVar[Any] = None
    request: Request
    call: Literal["submit"] = "submit"

    async def run(self, host: Host) -> None:
        await host.engine.submit(self.request)


@dataclass(frozen=True, slots=True)
class Abort:
    """Returns at once."""

    result: ClassVar[Any] = None
    request_id: str
    call: Literal["abort"] = "abort"

    async def run(self, host: Host) -> None:
        host.engine.abort(self.request_id)


@dataclass(frozen=True, slots=True)
class Check:
    result: ClassVar[Any] = None
    request: Request
    call: Literal["check"] = "check"

    async def run(self, host: Host) -> None:
        await host.engine.check(self.request)


@dataclass(frozen=True, slots=True)
class Stats:
    result: ClassVar[Any] = EngineStats
    call: Literal["stats"] = "stats"

    async def run(self, host: Host) -> EngineStats:
        return host.engine.stats()


@dataclass(frozen=True, slots=True)
class ClearCache:
    result: ClassVar[Any] = Cleared
    namespace_id: str | None
    tiers: frozenset[CacheTier]
    call: Literal["clear_cache"] = "clear_cache"

    async def run(self, host: Host) -> Cleared:
        return await host.engine.clear_cache(self.namespace_id, self.tiers)


@dataclass(frozen=True, slots=True)
class Probe:
    result: ClassVar[Any] = Probed
    prompt: tuple[int, ...]
    cache_salt: str
    adapter: str
    call: Literal["probe"] = "probe"

    async def run(self, host: Host) -> Probed:
        return await host.engine.probe(self.prompt, self.cache_salt, self.adapter)


@dataclass(frozen=True, slots=True)
class ListRequests:
    result: ClassVar[Any] = tuple[RequestInfo, ...]
    call: Literal["requests"] = "requests"

    async def run(self, host: Host) -> tuple[RequestInfo, ...]:
        return await host.engine.requests()


@dataclass(frozen=True, slots=True)
class OpenWatch:
    """There is one at a time."""

    result: ClassVar[Any] = None
    call: Literal["open_watch"] = "open_watch"

    async def run(self, host: Host) -> None:
        host.watch = await host.watching.enter_async_context(host.engine.watch())


@dataclass(frozen=True, slots=True)
class Look:
    result: ClassVar[Any] = int
    call: Literal["look"] = "look"

    async def run(self, host: Host) -> int:
        return await host.watch.look()


@dataclass(frozen=True, slots=True)
class Picture:
    result: ClassVar[Any] = CachePicture
    call: Literal["picture"] = "picture"

    async def run(self, host: Host) -> CachePicture:
        return await host.watch.picture()


@dataclass(frozen=True, slots=True)
class Node:
    result: ClassVar[Any] = NodeTokens | None
    node_id: int
    most_tokens: int
    call: Literal["node"] = "node"

    async def run(self, host: Host) -> NodeTokens | None:
        return await host.watch.node(self.node_id, self.most_tokens)


@dataclass(frozen=True, slots=True)
class CloseWatch:
    result: ClassVar[Any] = None
    call: Literal["close_watch"] = "close_watch"

    async def run(self, host: Host) -> None:
        await host.watching.aclose()


@dataclass(frozen=True, slots=True)
class Drain:
    """The last call. Its result is the engine's last statistics."""

    result: ClassVar[Any] = EngineStats
    timeout_seconds: float
    call: Literal["drain"] = "drain"

    async def run(self, host: Host) -> EngineStats:
        """Should something hang, say in the log what all threads do, before the server gives up."""
        faulthandler.dump_traceback_later(
            self.timeout_seconds + host.disk_seconds + HANGS_SECONDS, file=STDERR
        )
        try:
            await host.engine.drain(self.timeout_seconds)
        finally:
            faulthandler.cancel_dump_traceback_later()
        return host.engine.stats()


Call: TypeAlias = (
    Load
    | Submit
    | Abort
    | Check
    | Stats
    | ClearCache
    | Probe
    | ListRequests
    | OpenWatch
    | Look
    | Picture
    | Node
    | CloseWatch
    | Drain
)

RESULTS: dict[type, TypeAdapter[Any]] = {kind: TypeAdapter(kind.result) for kind in get_args(Call)}
