"""What a dialect brings: for each request an exchange, which knows what the engine is asked and how
its events become the answer; and the shape of its errors (errors.py).
"""

from collections.abc import Sequence
from typing import Protocol

from pydantic import BaseModel

from engine.api import Engine
from engine.types.output import OutputEvent
from engine.types.request import Request
from server.errors import ApiError
from server.generation.events import ChoiceT, UsageMeter


def wire_json(body: BaseModel) -> bytes:
    """The body as it is: it was built from typed values, so nothing validates it again.

    Keys that were not set are left out; nulls that were set are sent.
    """
    return body.model_dump_json(exclude_unset=True).encode()


class StreamWriter(Protocol):
    """One streamed answer as bytes. None at all: there is nothing to send yet.

    The status line goes out with the first bytes. Until then an error has a status of its own.
    """

    def events(self, choice: int, events: Sequence[OutputEvent]) -> bytes:
        """News of one choice. Several at once read as they would one after another, in fewer
        bytes where text can be joined."""
        ...

    def kept_bytes(self, events: Sequence[OutputEvent]) -> int:
        """What it will keep of them until its end, with what rendering that takes."""
        ...

    def keep_alive(self) -> bytes:
        """What tells a client that waits that it waits for something."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """The end of an answer that went wrong after it had begun."""
        ...

    def end(self) -> bytes:
        """What follows when every choice has finished."""
        ...


class Exchange(Protocol[ChoiceT]):
    """One request of a client, ready for the engine, and what becomes of its events."""

    @property
    def engine(self) -> Engine: ...

    @property
    def requests(self) -> Sequence[Request]: ...

    @property
    def meter(self) -> UsageMeter: ...

    @property
    def is_streamed(self) -> bool: ...

    def writer(self) -> StreamWriter: ...

    def new_choice(self) -> ChoiceT:
        """Takes in the events of one sequence of an answer that is sent in one piece."""
        ...

    def whole(self, choices: list[ChoiceT]) -> bytes:
        """The answer in one piece, as JSON. Called off the event loop: it may be long."""
        ...
