"""What is known of one HTTP request, shared by the middleware, the routes and the workers."""

import math
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from typing import cast

from anyio import CancelScope
from starlette.types import Scope

from engine.values.output import Usage
from server.errors import CLIENT_LEFT_STATUS, timed_out
from server.fair_limiter import Slot


@dataclass(slots=True)
class RequestRecord:
    """One HTTP request: its id, its client, its limits, and what the access log writes.

    `status` is 0 until the answer begins, or the client leaves before it.
    """

    id: str
    client: str  # for fairness: an address, or a key's name where there are several keys
    deadline: float = math.inf  # by which it must be answered, on the event loop's clock
    path: str = ""  # of its URL
    model: str = ""  # the name by which it asked for its model, when it has that
    own_model: str = ""  # its model's own name, which may differ from that one
    key: str = ""  # the name of its API key; what is stored under one is not seen under another
    has_admin_key: bool = False
    keep_alive_seconds: float | None = None
    """How long it wishes its model to stay loaded afterwards. None: the model's `ttl_seconds`."""
    n_bytes: int = 0  # of its body, and of what that names
    slot: Slot = field(default_factory=Slot)  # of the worker that prepares large requests
    allowed_models: frozenset[str] | None = None  # of its key, by name; None: all
    cache_namespace: str = ""  # of its key, if the keys share nothing
    held: AsyncExitStack = field(default_factory=AsyncExitStack)
    """Shares of its key's limits and of the body budget. RequestLimits closes it at the end of the
    request, unless background work has taken it over."""
    tokens: int = 0  # of the prompts that the engine took up, and of what it has said so far
    usage: Usage | None = None
    cache_marks: int = 0  # `cache_control` fields of the body
    status: int = 0
    is_answered: bool = False  # to its last byte
    client_left: bool = False  # before that

    def cache_salt(self, chosen: str) -> str:
        """The salt that the client chose, within the namespace of its key. No name has a NUL."""
        return f"{self.cache_namespace}\0{chosen}" if self.cache_namespace else chosen

    @contextmanager
    def time_limit(self) -> Iterator[CancelScope]:
        """Ends the block at the deadline, whatever it waits for. Raises ApiError (504) then."""
        with CancelScope(deadline=self.deadline) as limit:
            yield limit
        if limit.cancelled_caught:
            raise timed_out()

    def leave(self) -> None:
        self.client_left = True
        self.answer(CLIENT_LEFT_STATUS)

    def answer(self, status: int) -> None:
        self.status = self.status or status


def request_record(scope: Scope) -> RequestRecord:
    """The record that RequestLog made for this request."""
    return cast(RequestRecord, scope["state"]["record"])
