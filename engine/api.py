"""The server's only door to the engine."""

from collections.abc import AsyncGenerator, Collection
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from engine.values.model import ModelCard, Tokenizer
from engine.values.output import OutputEvent
from engine.values.picture import CachePicture, NodeTokens
from engine.values.request import Request
from engine.values.stats import ALL_TIERS, CacheTier, Cleared, EngineStats, Probed, RequestInfo

__all__ = [
    "CachePicture",
    "CacheWatch",
    "Engine",
    "EngineError",
    "EngineStopped",
    "InvalidRequest",
    "ModelError",
    "NoGrammars",
    "NodeTokens",
    "PromptTooLong",
    "QueueFull",
]


class EngineError(Exception):
    """Base of everything the engine tells a caller."""


class InvalidRequest(EngineError):
    """The request can never be served as it stands. `param` names the field at fault."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLong(EngineError):
    """The text has more tokens than a sequence may have, at least so many: counting ended there."""

    def __init__(self, at_least_tokens: int) -> None:
        super().__init__(f"the text has at least {at_least_tokens} tokens")
        self.at_least_tokens = at_least_tokens


class QueueFull(EngineError):
    """No room to wait in. In about `retry_after_seconds` there is, at the queue's present pace."""

    def __init__(self, message: str, retry_after_seconds: int) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class EngineStopped(EngineError):
    """The engine is draining or its loop has died; the request was not, or is no longer, served."""


class ModelError(EngineError):
    """The model cannot be found, read, or fitted into this machine."""


class NoGrammars(EngineError):
    """The processes that read grammars do not start, or are ended from outside."""


class CacheWatch(Protocol):
    """Sees the cache change. For one task at a time; raises EngineStopped."""

    async def look(self) -> int:
        """The version of what there is now. Waits for the end of the running step."""
        ...

    async def picture(self) -> CachePicture:
        """What the last look has seen."""
        ...

    async def node(self, node_id: int, most_tokens: int) -> NodeTokens | None:
        """A node's tokens, at most so many of them; None where it is no more."""
        ...


class Engine(Protocol):
    """What a running engine answers. Every coroutine may be awaited on any one event loop."""

    @property
    def card(self) -> ModelCard: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    def generate(self, request: Request) -> AsyncGenerator[OutputEvent, None]:
        """Submit, and yield the events of all n sequences until each has finished.

        Take them as they come: the engine waits for nobody, and what is not taken stays in memory.
        Closing the iterator (or cancelling the task that reads it) aborts the request: within a
        step no block is held for it, also when it was still queued.

        Raises InvalidRequest, QueueFull or EngineStopped at the first `__anext__`.
        """
        ...

    async def check(self, request: Request) -> None:
        """Raises InvalidRequest for what `generate` would refuse however much room there is."""
        ...

    async def stats(self) -> EngineStats:
        """The statistics as of now, at once: also while a step runs, and when the loop is dead. Of
        a process that does not answer soon, or has ended, those that were last read.
        """
        ...

    async def clear_cache(
        self, namespace_id: str | None = None, tiers: Collection[CacheTier] = ALL_TIERS
    ) -> Cleared:
        """Of one namespace, as pictures name it, or all. There may be nothing of that name, nor a
        disk cache.
        """
        ...

    def watch(self) -> AbstractAsyncContextManager[CacheWatch]:
        """Only while somebody watches is anything noted; one watch at a time."""
        ...

    async def probe(self, prompt: tuple[int, ...], cache_salt: str, adapter: str) -> Probed:
        """What a request with this prompt would find cached now. Changes nothing."""
        ...

    async def requests(self) -> tuple[RequestInfo, ...]:
        """The live sequences. Asks the loop, which answers when the running step has ended; of one
        that does not answer, what is known, soon. Raises EngineStopped.
        """
        ...

    def is_alive(self) -> bool:
        """Whether the loop's thread runs and turns."""
        ...

    async def ended(self) -> str:
        """Returns when nothing is served any more, for `drain` or by itself: why, in words."""
        ...

    async def drain(self, timeout_seconds: float) -> None:
        """Refuse new requests, let running ones finish, abort what is left, stop the thread. A step
        that hangs cannot be aborted: then this does not end, unless it is cancelled.
        """
        ...
