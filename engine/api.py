"""The calls that the server may make to an engine, and their errors."""

from collections.abc import Callable
from typing import Protocol

from engine.values.images import Detail, Image, PreparedImage
from engine.values.model import ModelCard, Tokenizer
from engine.values.output import OutputEvent
from engine.values.request import Request
from engine.values.stats import ALL_TIERS, CacheTier, Cleared, EngineStats, Probed, RequestInfo
from engine.values.tokens import PackedTokens
from engine.values.tree import NodeTokens, TreeChanges, TreeSnapshot

Report = Callable[[str], None]
"""Takes a line for a person to read on a long task, such as loading a model. A line with "…" at its
end is what is being done; any other is a result.
"""

Progress = Callable[[int, int], None]
"""Takes the number of bytes fetched so far, and the total as far as it is known."""


class EngineError(Exception):
    """Base of the errors that a caller of the engine may get."""


class InvalidRequest(EngineError):
    """The request can never be served as it stands. `param` names the field at fault."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLong(EngineError):
    """The text has more tokens than a sequence may have. Counting ended at `at_least_tokens`."""

    def __init__(self, at_least_tokens: int) -> None:
        super().__init__(f"the text has at least {at_least_tokens} tokens")
        self.at_least_tokens = at_least_tokens


class QueueFull(EngineError):
    """The queue is full. At its present pace it has room in about `retry_after_seconds`."""

    def __init__(self, message: str, retry_after_seconds: int) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class InvalidImage(EngineError):
    """The image, or any image, can never be served with this model as it stands."""


class ImagesBusy(EngineError):
    """Too many images wait to be decoded. At their present pace there is room in about
    `retry_after_seconds`.
    """

    def __init__(self, message: str, retry_after_seconds: int) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class EngineStopped(EngineError):
    """The engine is draining or its loop has died; the request was not, or is no longer, served."""


class ModelError(EngineError):
    """The model cannot be found, read, or served on this machine."""


_MAX_CHARACTERS = 300


def one_line(error: BaseException) -> str:
    """The message of another library's exception on one line, cut after 300 characters."""
    text = " ".join(str(error).split())
    if not text or isinstance(error, LookupError):  # the message of a KeyError is only the key
        text = f"{type(error).__name__} {text}".strip()
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]} ..."


class NoGrammars(EngineError):
    """The processes that read grammars do not start, or are ended from outside."""


class EventSink(Protocol):
    """Receives the engine's output for a request."""

    def put(self, event: OutputEvent) -> None:
        """Take the next event of one of its sequences."""
        ...

    def fail(self, error: BaseException) -> None:
        """The request was refused, or its engine has stopped. No more events come."""
        ...


class Submission(Protocol):
    """A request that an engine computes, until `end`, which must be called."""

    def end(self) -> None:
        """Abort what has not finished, queued or running: within a step no block is held for it.
        No more events come. May be called twice.
        """
        ...


class Engine(Protocol):
    """A running engine. Every coroutine may be awaited on any event loop."""

    @property
    def card(self) -> ModelCard: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    def generate(self, request: Request, sink: EventSink) -> Submission:
        """Have the request computed. The sink gets the events of all n sequences, on the running
        event loop, until each has finished, or InvalidRequest, QueueFull or EngineStopped where the
        request is refused.

        The engine waits for no sink.
        """
        ...

    async def check(self, request: Request) -> None:
        """Raises InvalidRequest if `generate` would refuse the request even with an empty queue."""
        ...

    async def prepare_image(self, source: str, folder: str, detail: Detail) -> PreparedImage:
        """Decode the image in the file `source`, which lies below `folder`, and write the array
        that the model reads into the folder, unless it is there. The array's file is named by its
        digest. If the caller is cancelled, the image may be dropped.

        Raises InvalidImage, ImagesBusy and EngineStopped.
        """
        ...

    async def stats(self) -> EngineStats:
        """The statistics as of now. Does not wait for the running step. If the engine does not
        answer soon, or has ended, these are the statistics that were last read.
        """
        ...

    async def clear_cache(
        self, namespace_id: str | None = None, tiers: frozenset[CacheTier] = ALL_TIERS
    ) -> Cleared:
        """Clear one namespace, by its id in `tree`, or all. Does nothing if there is no such
        namespace, and in a tier that does not exist.
        """
        ...

    async def give_back(self, evicted_share: float) -> int:
        """Give memory that is not needed now back to the system: buffers that are kept for the next
        step, and the memory of free blocks and states as far as it can be had. Before that, evict
        up to `evicted_share` of all blocks of the prefix cache, the least recently used first.
        What a disk cache does not have of them is written first, as far as that takes no more than
        a second or two. Returns the number of evicted blocks. Raises TimeoutError if the engine
        does not answer soon, and EngineStopped.
        """
        ...

    async def tree(self, since: int) -> TreeSnapshot | TreeChanges:
        """The cache and the live sequences, when the running step has ended.

        `since` is the version of the snapshot that the caller has, 0 if it has none. If the engine
        has that snapshot, too, it returns the changes, else a whole snapshot. It forgets a snapshot
        some seconds after the last call. Raises TimeoutError if the engine does not answer soon,
        and EngineStopped.
        """
        ...

    async def node(self, node_id: int, most_tokens: int) -> NodeTokens | None:
        """The first `most_tokens` tokens of a node of the tree; None if it is no longer there.
        Raises EngineStopped.
        """
        ...

    async def probe(
        self,
        prompt: PackedTokens,
        cache_salt: str,
        adapter: str,
        images: tuple[Image, ...] = (),
    ) -> Probed:
        """The number of tokens of this prompt that are cached now. Changes nothing."""
        ...

    async def requests(self) -> tuple[RequestInfo, ...]:
        """The live sequences, when the running step has ended. If the engine does not answer soon,
        these are the sequences that were last read. Raises EngineStopped.
        """
        ...

    def is_alive(self) -> bool:
        """Whether the engine's thread runs and makes steps."""
        ...

    async def ended(self) -> str:
        """Returns when the engine serves no more, drained or not: why, in words."""
        ...

    async def drain(self, timeout_seconds: float) -> None:
        """Refuse new requests, let running ones finish, abort the rest after `timeout_seconds`, and
        stop the engine. A step that hangs cannot be aborted: then this ends only if cancelled.
        """
        ...
