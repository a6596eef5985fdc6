"""What a dialect implements: a ResponseBuilder per request, which is a StreamingBuilder where the
response may be streamed, and a StreamWriter per stream.

The error objects of all dialects are in errors.py.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import jiter
from pydantic import BaseModel

from engine.api import Engine
from engine.values.output import OutputEvent
from engine.values.request import Request
from server.activity.tracker import RequestTracker
from server.errors import ApiError
from server.generation.events import ChoiceT, UsageMeter, generating
from server.http.unsent import Unsent, kept_bytes
from server.record import RequestRecord


def wire_json(body: BaseModel) -> bytes:
    """The body as it is: it was built from typed values, so nothing validates it again.

    Keys that were not set are left out; nulls that were set are sent.
    """
    return body.model_dump_json(exclude_unset=True).encode()


def generated(events: Sequence[OutputEvent]) -> list[OutputEvent]:
    """The events with output: without those that only say that the sequence was admitted."""
    return [event for event in events if event.admission is None]


class StreamWriter(Protocol):
    """One streamed response as bytes. Empty bytes: there is nothing to send yet.

    The status line goes out with the first bytes. Until then an error has a status of its own.
    """

    @property
    def media_type(self) -> str: ...

    def events(self, choice: int, events: Sequence[OutputEvent]) -> bytes:
        """The next events of one choice. Text of several events may be joined, to save bytes."""
        ...

    def kept_bytes(self, events: Sequence[OutputEvent]) -> int:
        """The memory that it keeps of the events until its end, rendering included."""
        ...

    def keep_alive(self) -> bytes:
        """What is sent while nothing else is, so that no client or proxy gives up."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """The end of a response that failed after it had begun."""
        ...

    def end(self) -> bytes:
        """The end of a response, when every choice has finished."""
        ...


class ResponseBuilder(Protocol[ChoiceT]):
    """One client's request as engine requests, and their events as the response."""

    @property
    def engine(self) -> Engine: ...

    @property
    def requests(self) -> Sequence[Request]: ...

    @property
    def meter(self) -> UsageMeter: ...

    def new_choice(self) -> ChoiceT:
        """Collects the events of one sequence, for a response that is not streamed."""
        ...

    def whole(self, choices: list[ChoiceT]) -> bytes:
        """The whole response as JSON. Called in a worker thread: it may be long."""
        ...


class StreamingBuilder(ResponseBuilder[ChoiceT], Protocol[ChoiceT]):
    """One whose response is a stream where the client asks for that."""

    @property
    def is_streamed(self) -> bool: ...

    def writer(self) -> StreamWriter: ...


async def generate_all(
    builder: ResponseBuilder[ChoiceT],
    unsent: Unsent,
    record: RequestRecord,
    tracker: RequestTracker,
) -> list[ChoiceT]:
    """All sequences, complete, in order of choices. Raises ApiError where they are too large."""
    choices = [builder.new_choice() for request in builder.requests for _ in range(request.n)]
    engine, requests = builder.engine, builder.requests
    async with generating(engine, requests, unsent, record, tracker) as events:
        async for batch in events:
            for choice, event in batch:
                unsent.add(kept_bytes(event))
                choices[choice].add(event)
                builder.meter.add(choice, event.usage)
    return choices


def as_arguments(text: str) -> dict[str, Any]:
    """The arguments of a call as an object; of one that was cut off, as much as there is."""
    try:
        value = jiter.from_json(text.encode(), partial_mode=True)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
