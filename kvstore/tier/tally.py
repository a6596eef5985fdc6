"""What the tier has done since it was opened, counted from several threads."""

import threading
from collections import Counter
from dataclasses import dataclass, replace

from kvstore.tier.types import Fault

RATE_MEMORY_BYTES = 256 << 20
"""The observed rate forgets what was read longer ago than about so much."""


@dataclass(frozen=True, slots=True)
class TierCounters:
    """Since the tier was opened. Entries that are `orphaned` had lost their parent before they were
    written, those that are `refused` found no room.
    """

    written_entries: int = 0
    written_bytes: int = 0
    read_entries: int = 0
    read_bytes: int = 0
    evicted_entries: int = 0
    orphaned_entries: int = 0
    refused_entries: int = 0
    faults: tuple[tuple[Fault, int], ...] = ()


class Tally:
    """See the module."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters = TierCounters()
        self._faults = Counter[Fault]()
        self._rate_bytes = self._rate_seconds = 0.0

    def count(self, **more: int) -> None:
        """Add to the counters of these names."""
        with self._lock:
            now = {name: getattr(self._counters, name) + n for name, n in more.items()}
            self._counters = replace(self._counters, **now)

    def fault(self, fault: Fault) -> None:
        with self._lock:
            self._faults[fault] += 1

    def timed(self, n_bytes: int, seconds: float) -> None:
        """So many bytes were read and checked in so many seconds."""
        with self._lock:
            kept = max(0.0, 1 - n_bytes / RATE_MEMORY_BYTES)
            self._rate_bytes = self._rate_bytes * kept + n_bytes
            self._rate_seconds = self._rate_seconds * kept + seconds

    @property
    def read_rate(self) -> float | None:
        """Bytes a second; None before anything was read."""
        with self._lock:
            return self._rate_bytes / self._rate_seconds if self._rate_seconds else None

    def counters(self) -> TierCounters:
        with self._lock:
            return replace(self._counters, faults=tuple(sorted(self._faults.items())))
