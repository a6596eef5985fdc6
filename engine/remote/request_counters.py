"""Counts how the sequences that callers have requested have ended."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

from engine.api import EngineError, InvalidRequest, QueueFull
from engine.values.output import FinishReason, OutputEvent
from engine.values.request import RefusalReason
from engine.values.stats import SequenceCounts

_REASONS = {InvalidRequest: RefusalReason.INVALID, QueueFull: RefusalReason.QUEUE_FULL}


class TrackedRequest:
    """One request. `live` has the indices of its sequences whose end is not known yet."""

    def __init__(self, counters: "RequestCounters", n: int) -> None:
        self._counters = counters
        self.live = set(range(n))

    def note(self, event: OutputEvent) -> None:
        """Note an event that the caller is about to get."""
        if event.finish_reason is not None:
            self.live.remove(event.index)
            self._counters.finished(event.finish_reason, 1)


class RequestCounters:
    """Counts sequences where callers get their events. So the sums are right however a request
    ends, also when the engine has never received it, or has died.

    Thread-safe, because callers may live on several event loops.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._received = 0
        self._refused = dict.fromkeys(RefusalReason, 0)
        self._finished = dict.fromkeys(FinishReason, 0)

    @contextmanager
    def track(self, n: int) -> Iterator[TrackedRequest]:
        """Count a request of n sequences while the block runs. If the block raises, the sequences
        that have not ended were refused by an EngineError, and aborted by any other exception.
        """
        tracked = TrackedRequest(self, n)
        with self._lock:
            self._received += len(tracked.live)
        try:
            yield tracked
        except EngineError as error:
            with self._lock:
                self._refused[_REASONS.get(type(error), RefusalReason.STOPPED)] += len(tracked.live)
            raise
        except BaseException:
            self.finished(FinishReason.ABORT, len(tracked.live))
            raise

    def finished(self, reason: FinishReason, n_sequences: int) -> None:
        with self._lock:
            self._finished[reason] += n_sequences

    def counts(self) -> SequenceCounts:
        with self._lock:
            return SequenceCounts(self._received, self._refused.copy(), self._finished.copy())
