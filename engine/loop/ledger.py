"""What became of every sequence that a caller has asked for."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from types import MappingProxyType

from engine.api import EngineError, InvalidRequest, QueueFull
from engine.types.output import FinishReason, OutputEvent
from engine.types.request import RefusalReason
from engine.types.statistics import SequenceCounts


class Entry:
    """One request's sequences. `live` has the indices of those whose end is not known yet."""

    def __init__(self, ledger: "Ledger", n: int) -> None:
        self._ledger = ledger
        self.live = set(range(n))

    def note(self, event: OutputEvent) -> None:
        """Take in an event that the caller is about to get."""
        if event.finish_reason is not None:
            self.live.remove(event.index)
            self._ledger.finished(event.finish_reason, 1)


class Ledger:
    """Counts at the engine's door what callers get to see, so that the sum is right however a
    request ends: also when the engine never hears of it, or dies over it.

    Safe from any thread, because callers may live on several event loops.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._received = 0
        self._refused = dict.fromkeys(RefusalReason, 0)
        self._finished = dict.fromkeys(FinishReason, 0)

    @contextmanager
    def entry(self, n: int) -> Iterator[Entry]:
        """A request's stay. An EngineError out of the block is a refusal of all n sequences;
        those that live when it is left in another way were aborted."""
        entry = Entry(self, n)
        with self._lock:
            self._received += len(entry.live)
        try:
            yield entry
        except EngineError as error:
            with self._lock:
                self._refused[_reason(error)] += len(entry.live)
            raise
        except BaseException:
            self.finished(FinishReason.ABORT, len(entry.live))
            raise

    def finished(self, reason: FinishReason, n_sequences: int) -> None:
        with self._lock:
            self._finished[reason] += n_sequences

    def counts(self) -> SequenceCounts:
        with self._lock:
            return SequenceCounts(
                self._received,
                MappingProxyType(self._refused.copy()),
                MappingProxyType(self._finished.copy()),
            )


def _reason(error: EngineError) -> RefusalReason:
    match error:
        case InvalidRequest():
            return RefusalReason.INVALID
        case QueueFull():
            return RefusalReason.QUEUE_FULL
        case _:
            return RefusalReason.STOPPED
