"""Estimates of the memory of generated output, and of the work of rendering it."""

from collections.abc import Sequence

from engine.values.output import OutputEvent, TokenLogprob

# Bytes of memory on CPython 3.11, measured with tracemalloc and rounded up.
CHARACTER_BYTES = 4
EVENT_BYTES = 300  # an OutputEvent in a queue
LOGPROB_BYTES = 150  # a TokenLogprob without its alternatives
ALTERNATIVE_BYTES = 110  # an alternative of a TokenLogprob
RENDERED_LOGPROB_BYTES = 1000  # added for a TokenLogprob when a whole answer is rendered
RENDERED_ALTERNATIVE_BYTES = 800  # added for an alternative then
RENDERED_PROMPT_LOGPROB_BYTES = 650  # for a TokenLogprob of an echoed prompt: its shape is leaner
RENDERED_PROMPT_ALTERNATIVE_BYTES = 100  # for an alternative of one
RENDERED_PER_VECTOR_BYTE = 19  # numbers as Python objects, and as JSON
TOKEN_BYTES = 65  # a token's id in an answer that lists ids
TOKEN_TEXT_BYTES = 100  # a token's text in such an answer

RENDER_TO_PARSE_COST = 16
"""Bytes that are rendered, logprobs included, in the time in which one byte of a body is parsed."""


def rendering_bytes(n_bytes: int) -> int:
    """The work of rendering output of n_bytes, in bytes of a body whose parsing takes as long."""
    return n_bytes // RENDER_TO_PARSE_COST


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
