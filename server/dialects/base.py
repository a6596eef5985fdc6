"""What a dialect makes of a request: a Job, with a StreamWriter where the response is a stream.

The error objects of all dialects are in errors.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jiter
from pydantic import BaseModel

from engine.values.model import Tokenizer
from engine.values.output import OutputEvent
from engine.values.request import Request
from server.activity import RequestTracker
from server.budget import Reservation
from server.errors import ApiError
from server.generation.choice import AnswerUsage, Choice, Step, answer_usage
from server.generation.models import ServedModel
from server.generation.output_size import kept_bytes
from server.generation.plan import AnswerPlan
from server.generation.stream import generating
from server.parsing.json_text import whole_characters
from server.record import RequestRecord


def wire_json(body: BaseModel) -> bytes:
    """The body as it is: it was built from typed values, so nothing validates it again.

    Keys that were not set are left out; nulls that were set are sent.
    """
    return body.model_dump_json(exclude_unset=True).encode()


class StreamWriter(Protocol):
    """One streamed response as bytes. Empty bytes: there is nothing to send yet.

    The status line goes out with the first bytes. Until then an error has a status of its own.
    """

    @property
    def media_type(self) -> str: ...

    def write(self, choice: int, steps: Sequence[Step]) -> bytes:
        """The next steps of one choice, perhaps none. Called after each growth of its output, and
        when it has finished.
        """
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

    def end(self, usage: AnswerUsage) -> bytes:
        """The end of a response, when every choice has finished."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a client's request asks of the engine, and how the answers become its response.

    It lives as long as the answer. It does not hold the request's body, which may be large.
    """

    model: ServedModel
    requests: Sequence[Request]
    render: Callable[[Sequence[Choice], AnswerUsage], bytes]
    """Makes the whole response, as JSON. Called in a worker thread: it may be long."""
    writer: Callable[[Sequence[Choice]], StreamWriter] | None = None
    """Makes the writer of a stream of these choices. None: the response is sent whole."""
    plan: AnswerPlan | None = None  # None: all text is content
    tokenizer: Tokenizer | None = None  # where blocks keep the log-probabilities of their text

    def choices(self) -> list[Choice]:
        """An empty answer for each sequence, in the order of the requests."""
        return [
            Choice(self.plan, remember, self.tokenizer)
            for request in self.requests
            for remember in [partial(self.model.replays.remember, request.cache_salt)] * request.n
        ]

    def usage(self, choices: Sequence[Choice]) -> AnswerUsage:
        """What the choices, which are all of the response, have used."""
        return answer_usage(choices, self.requests[0].n)


async def generate_all(
    job: Job, output: Reservation, record: RequestRecord, tracker: RequestTracker
) -> list[Choice]:
    """All sequences, complete, in order. Raises ApiError where they are too large."""
    choices = job.choices()
    with generating(job.model.engine, job.requests, output, record, tracker) as inbox:
        async for batch in inbox:
            for index, events in batch.items():
                output.add(sum(map(kept_bytes, events)))
                choices[index].feed(events)
    record.usage = job.usage(choices)
    return choices


def as_arguments(text: str) -> dict[str, Any]:
    """The arguments of a call as an object; of one that was cut off, as much as there is."""
    try:
        value = jiter.from_json(whole_characters(text).encode(), partial_mode=True)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
