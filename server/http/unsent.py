"""Limits on the memory of generated output that clients have not read: per answer and in total."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

from starlette.types import Scope

from engine.values.output import OutputEvent, TokenLogprob
from server.errors import SERVER, ApiError

RETRY_AFTER_SECONDS = 5

# Bytes of memory on CPython 3.11, measured with tracemalloc and rounded up.
CHARACTER_BYTES = 4
EVENT_BYTES = 300  # an OutputEvent in a queue
LOGPROB_BYTES = 150  # a TokenLogprob ...
ALTERNATIVE_BYTES = 110  # ... and each of its alternatives
RENDERED_LOGPROB_BYTES = 1000  # what rendering a whole answer adds to the one ...
RENDERED_ALTERNATIVE_BYTES = 800  # ... and to the other
RENDERED_PROMPT_LOGPROB_BYTES = 650  # the same for those of an echoed prompt, whose ...
RENDERED_PROMPT_ALTERNATIVE_BYTES = 100  # ... shape is leaner
RENDERED_PER_VECTOR_BYTE = 19  # numbers as Python has them, and as JSON
TOKEN_BYTES = 65  # a token's id in an answer that lists them ...
TOKEN_TEXT_BYTES = 100  # ... and its text beside it

HELD_PER_READ = 16
"""Bytes that are rendered, logprobs included, in the time in which one byte of a body is parsed."""

Overrun = Callable[[ApiError], None]
"""Called with the error that ends an answer, to free its memory."""


class UnsentBudget:
    """The memory of all answers. Where it is too much, the largest answer is ended."""

    def __init__(self, max_answer_bytes: int, max_total_bytes: int) -> None:
        self._max_answer_bytes = max_answer_bytes
        self._max_total_bytes = max_total_bytes
        self._answers: set[Unsent] = set()
        self._total_bytes = 0
        self.n_ended = 0

    @contextmanager
    def answer(self, overrun: Overrun) -> Iterator["Unsent"]:
        """One request's share, given back at the end of the block."""
        unsent = Unsent(self, overrun)
        self._answers.add(unsent)
        try:
            yield unsent
        finally:
            self._close(unsent)

    def charge(self, answer: "Unsent", n_bytes: int) -> None:
        """Count bytes, negative ones as given back, and end an answer where they are too many."""
        if answer.error is not None:
            return
        answer.n_bytes += n_bytes
        self._total_bytes += n_bytes
        if answer.n_bytes > self._max_answer_bytes:
            self._end(answer, self._too_large())
        elif self._total_bytes > self._max_total_bytes:
            largest = max(self._answers, key=lambda other: other.n_bytes)
            self._end(largest, self._too_much())

    def _end(self, answer: "Unsent", error: ApiError) -> None:
        self.n_ended += 1
        self._close(answer)
        answer.error = error
        answer.overrun(error)

    def _close(self, answer: "Unsent") -> None:
        self._answers.discard(answer)
        self._total_bytes -= answer.n_bytes
        answer.n_bytes = 0

    def _too_large(self) -> ApiError:
        return ApiError(
            400,
            f"More than {self._max_answer_bytes} bytes of this answer were waiting to be sent "
            "(max_unsent_bytes). Read a stream as it comes, or ask for less: n, max_tokens, "
            "logprobs.",
            code="answer_too_large",
        )

    def _too_much(self) -> ApiError:
        return ApiError(
            503,
            "The server holds too many unsent answers, and this was the largest "
            "(max_total_unsent_bytes). Read a stream as it comes, or try again later.",
            type=SERVER,
            code="overloaded",
            headers={"Retry-After": str(RETRY_AFTER_SECONDS)},
        )


class Unsent:
    """The memory of one answer. Once the answer has been ended, `add` raises its error."""

    def __init__(self, budget: UnsentBudget, overrun: Overrun) -> None:
        self._budget = budget
        self.overrun = overrun
        self.n_bytes = 0
        self.error: ApiError | None = None

    def add(self, n_bytes: int) -> None:
        """Raises ApiError when the answer holds, or has held, too much."""
        self._budget.charge(self, n_bytes)
        if self.error is not None:
            raise self.error

    def give_back(self, n_bytes: int) -> None:
        self._budget.charge(self, -n_bytes)

    @contextmanager
    def ended_by(self, overrun: Overrun) -> Iterator[None]:
        """In the block, `overrun` is called in place of the one before."""
        before, self.overrun = self.overrun, overrun
        try:
            yield
        finally:
            self.overrun = before


def unsent_of(scope: Scope) -> Unsent:
    """The share that RequestLimits opened for this request."""
    return cast(Unsent, scope["state"]["unsent"])


def rendering_bytes(unsent: Unsent) -> int:
    """The work of rendering an answer, in bytes of a body whose parsing takes as long."""
    return unsent.n_bytes // HELD_PER_READ


def queued_bytes(event: OutputEvent) -> int:
    """The memory of an event in a stream's queue."""
    return EVENT_BYTES + _held_bytes(event)


def kept_bytes(event: OutputEvent) -> int:
    """The memory of an event that is kept for a whole answer, rendering included."""
    output = _weighed(event.logprobs, RENDERED_LOGPROB_BYTES, RENDERED_ALTERNATIVE_BYTES)
    prompt = _weighed(
        event.prompt_logprobs,
        RENDERED_PROMPT_LOGPROB_BYTES,
        RENDERED_PROMPT_ALTERNATIVE_BYTES,
    )
    vector = RENDERED_PER_VECTOR_BYTE * len(event.pooled)
    return _held_bytes(event) + output + prompt + vector


def _held_bytes(event: OutputEvent) -> int:
    entries = (*event.logprobs, *event.prompt_logprobs)
    logprobs = _weighed(entries, LOGPROB_BYTES, ALTERNATIVE_BYTES)
    return CHARACTER_BYTES * len(event.text) + logprobs + len(event.pooled)


def _weighed(entries: Sequence[TokenLogprob | None], each: int, alternative: int) -> int:
    alternatives = sum(len(entry.top) for entry in entries if entry is not None)
    return each * len(entries) + alternative * alternatives
