"""The record of one HTTP request, shared by the gateway, the routes and the workers."""

import math
import time
from collections.abc import Callable, Hashable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple, cast

from anyio import CancelScope
from starlette.types import Scope

from engine.values.images import PreparedImage
from engine.values.output import Usage
from server.errors import ApiError, timed_out
from server.fairness import Reservation


@dataclass(frozen=True, slots=True)
class Principal:
    """The sender of a request and its permissions."""

    client: str  # for fairness: an address, or a key's name where there are several keys
    key: str = ""  # the name of its API key; what is stored under one is not seen under another
    is_admin: bool = False  # by its key
    namespace: str = ""  # of the prefix cache, if keys share nothing
    allowed_models: frozenset[str] | None = None  # of its key, by name; None: all


class KnownImage(NamedTuple):
    """An image of a request: the digest of its bytes, and what the model is shown of it."""

    original: bytes
    prepared: PreparedImage


@dataclass(slots=True)
class RequestRecord:
    """One HTTP request: its id, its sender, its limits, and the fields of the access log.

    `status` is 0 until the answer begins, or the client leaves before it.
    """

    id: str
    principal: Principal
    deadline: float = math.inf  # by which it must be answered, on the event loop's clock
    path: str = ""  # of its URL
    user_agent: str = ""  # the User-Agent header, as its client wrote it
    model: str = ""  # the name by which it asked for its model, when it has that
    own_model: str = ""  # its model's own name, which may differ from that one
    keep_alive_seconds: float | None = None
    """How long it wishes its model to stay loaded afterwards. None: the model's `ttl_seconds`."""
    arrived_ns: int = field(default_factory=time.perf_counter_ns)
    body: Reservation | None = None
    """Memory of its body until a worker has read it, then of what is kept of it until the answer is
    complete."""
    output: Reservation | None = None  # memory of its answer, until the client has read it
    held: AsyncExitStack = field(default_factory=AsyncExitStack)
    """Its model, and its places in its key's limits. The gateway closes it at the end of the
    request, unless background work has taken it over."""
    images: dict[Hashable, KnownImage] = field(default_factory=dict)
    """Images that have been prepared for it, by their source and detail."""
    on_end: Callable[[ApiError], object] | None = None  # of the innermost time limit
    ended: tuple[int, str | None] | None = None  # status and code of the error of `end`
    limit: CancelScope | None = None  # which ends it where its answer has not begun by its deadline
    tokens: int = 0  # of the prompts that the engine took up, and of what it has said so far
    usage: Usage | None = None
    cache_marks: int = 0  # `cache_control` fields of the body
    is_background: bool = False  # a line of a batch: computed while nothing else is
    status: int = 0
    error_code: str | None = None  # of the error that it was answered with
    was_tracked: bool = False  # `RequestTracker.answering` has seen its end
    is_answered: bool = False  # to its last byte
    client_left: bool = False  # before that

    @property
    def client(self) -> str:
        """The principal's client."""
        return self.principal.client

    @property
    def key(self) -> str:
        """The name of the principal's API key, or nothing."""
        return self.principal.key

    def never_ends(self) -> None:
        """Its answer is an endless stream; only its beginning has a time limit."""
        self.deadline = math.inf

    def cache_salt(self, chosen: str) -> str:
        """The salt that the client chose, within the namespace of its key. No name has a NUL."""
        namespace = self.principal.namespace
        return f"{namespace}\0{chosen}" if namespace else chosen

    def end(self, error: ApiError) -> bool:
        """End the request with an error, whatever it waits for. False where nothing is to be ended:
        its answer is complete.
        """
        if self.on_end is None:
            return False
        self.on_end(error)
        return True

    def begin_answer(self, status: int) -> None:
        """The status line is sent: the deadline no longer applies."""
        self.status = self.status or status
        if self.limit is not None:
            self.limit.deadline = math.inf

    def replace_body(self, kept_bytes: int) -> None:
        """The body has been read, and kept_bytes of what was made of it are kept. Raises ApiError
        (503) where they are too many.
        """
        if self.body is not None:
            self.body.resize(kept_bytes)

    def time_limit(self) -> "TimeLimit":
        """A context that ends its block at the deadline, or with `end`, whatever it waits for."""
        return TimeLimit(self)


class TimeLimit:
    """A context manager that ends a request's block at the deadline, or with `RequestRecord.end`,
    whatever it waits for. It raises ApiError then: 504 at the deadline.

    It is no generator: contextlib would throw the cancellation into that, and from Python 3.12 on
    the two frames and the exception refer to one another. They would keep the request until the
    garbage collector looks at all objects.
    """

    def __init__(self, record: RequestRecord) -> None:
        self._record = record
        self._scope = CancelScope(deadline=record.deadline)
        self._error: ApiError | None = None
        self._before: Callable[[ApiError], object] | None = None
        self._own: Callable[[ApiError], object] | None = None

    def __enter__(self) -> CancelScope:
        self._scope.__enter__()
        self._own = self._end
        self._before, self._record.on_end = self._record.on_end, self._own
        return self._scope

    def __exit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if self._record.on_end is self._own:  # else a background response has taken the record over
            self._record.on_end = self._before
        self._own = self._before = None
        is_swallowed = self._scope.__exit__(kind, raised, traceback)
        if self._scope.cancelled_caught:
            raise self._take_error()  # in no local variable: it would be in a cycle with its frame
        return bool(is_swallowed)

    def _end(self, error: ApiError) -> None:
        self._record.ended = error.status, error.code
        self._error = error
        self._scope.cancel()

    def _take_error(self) -> ApiError:
        error, self._error = self._error, None
        return error or timed_out()


def request_record(scope: Scope) -> RequestRecord:
    """The record that the gateway made for this request."""
    return cast(RequestRecord, scope["state"]["record"])


def output_of(record: RequestRecord) -> Reservation:
    """The memory of its answer. Only for a request that has come through the gateway."""
    assert record.output is not None
    return record.output
