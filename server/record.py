"""What the parts that handle a request know of it."""

import math
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from typing import cast

from anyio import CancelScope
from starlette.types import Scope

from engine.types.output import Usage
from server.errors import CLIENT_LEFT_STATUS, timed_out
from server.turns import Turn


@dataclass(slots=True)
class RequestRecord:
    """What is known of one HTTP request: its id, who sent it, what it may take, and what the access
    log shall say.

    `status` is 0 until the answer begins, or the client leaves before it.
    """

    id: str
    client: str  # whose turn it takes: of an address, or of a key where there are several
    deadline: float = math.inf  # by which it must be answered, on the event loop's clock
    key: str = ""  # the name of its API key; what is stored under one is not seen under another
    n_bytes: int = 0  # of its body, and of what that names
    turn: Turn = field(default_factory=Turn)  # to be made ready for the engine, if it is large
    cache_namespace: str = ""  # of its key, if the keys share nothing
    held: AsyncExitStack = field(default_factory=AsyncExitStack)
    """What it has of its key's limits and of the bodies'. Intake lets go of it, unless work that
    goes on has taken it over."""
    tokens: int = 0  # of the prompts that the engine took up, and of what it has said so far
    usage: Usage | None = None
    cache_marks: int = 0  # how often the client said `cache_control`
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
