"""How much of its prompts is read, for the stream of a request that asks for it."""

import time
from collections.abc import Iterable, Sequence

from typing_extensions import TypedDict

from engine.values.output import OutputEvent
from engine.values.request import Request


class ProgressBody(TypedDict):
    """llama.cpp's `prompt_progress`: tokens of the prompt, in all, found in the cache, and read by
    now, cached ones included; and the milliseconds since reading began.
    """

    total: int
    cache: int
    processed: int
    time_ms: int


class PromptProgress:
    """The progress of all prompts of one HTTP request, which never goes back: what is computed
    again after a preemption counts once.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self._total = sum(len(request.prompt) for request in requests)
        self._cached: dict[str, int] = {}  # tokens of an engine request's prompt, by its id
        self._read: dict[str, int] = {}
        self._began_ns: int | None = None

    def note(self, events: Iterable[OutputEvent]) -> bool:
        """Whether the events say that more is read, or that reading begins."""
        has_changed = False
        for event in events:
            read_tokens = event.read_tokens
            if event.admission is not None:
                read_tokens = event.admission.cached_tokens
                self._began_ns = self._began_ns or time.perf_counter_ns()
                # The others of n sequences share what the first one has computed.
                self._cached.setdefault(event.request_id, read_tokens)
            if read_tokens is not None and read_tokens > self._read.get(event.request_id, -1):
                self._read[event.request_id] = read_tokens
                has_changed = True
        return has_changed

    def body(self) -> ProgressBody:
        """The figures as of now."""
        began_ns = self._began_ns or time.perf_counter_ns()
        return {
            "total": self._total,
            "cache": sum(self._cached.values()),
            "processed": sum(self._read.values()),
            "time_ms": (time.perf_counter_ns() - began_ns) // 1_000_000,
        }
