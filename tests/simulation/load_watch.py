"""Follows an engine's loads from outside, from turn to turn, and counts what becomes of them."""

from collections import defaultdict
from collections.abc import Iterator

from engine.core.sequence import LiveSequence
from engine.disk_cache.loader import _Load
from tests.simulation.census import Census, Happening
from tests.simulation.daemon import Daemon


class LoadWatch:
    """See the module."""

    def __init__(self, daemon: Daemon, census: Census) -> None:
        self._daemon = daemon
        self._census = census
        self._loads: list[_Load] = []
        self._waiters: defaultdict[_Load, set[LiveSequence]] = defaultdict(set)
        self._evictions = 0

    @property
    def n_ended(self) -> int:
        ends = (Happening.LOAD_WHOLE, Happening.LOAD_CUT, Happening.LOAD_TIMED_OUT)
        others = (Happening.LOAD_CLEARED, Happening.LOAD_FAILED, Happening.LOAD_OUTLIVED)
        return sum(self._census[end] for end in ends + others)

    def turned(self) -> None:
        """A turn is over: who has begun, who waits, who has ended?"""
        if self._loads:
            self._note_pressure()
        for load in self._loads:
            if load not in self._daemon.loads:
                self._census[self._end_of(load)] += 1
        self._remember()
        for load, sequence in self._waiting():
            self._note_waiter(load, sequence)

    def cut_off(self, reason: Happening) -> None:
        """Something from outside has just ended some of them, or all."""
        gone = [load for load in self._loads if load not in self._daemon.loads]
        self._census[reason] += len(gone)
        self._remember()

    def waits(self, request_id: str) -> bool:
        """Whether a sequence of the request waits for a load now."""
        return any(sequence.request.id == request_id for _, sequence in self._waiting())

    def _remember(self) -> None:
        self._loads = list(self._daemon.loads)
        self._evictions = self._daemon.store.counters.evictions

    def _note_pressure(self) -> None:
        evictions = self._daemon.store.counters.evictions
        self._census[Happening.EVICTED_LOADING] += evictions - self._evictions

    def _end_of(self, load: _Load) -> Happening:
        if load.n_committed == len(load.hashes):
            return Happening.LOAD_WHOLE
        if load.is_cut:
            return Happening.LOAD_CUT
        if self._daemon.clock() >= load.deadline:
            return Happening.LOAD_TIMED_OUT
        return Happening.LOAD_FAILED

    def _note_waiter(self, load: _Load, sequence: LiveSequence) -> None:
        waiters = self._waiters[load]
        if sequence not in waiters:
            waiters.add(sequence)
            self._census[Happening.WAITED if len(waiters) == 1 else Happening.DUPLICATE_WAITED] += 1

    def _waiting(self) -> Iterator[tuple[_Load, LiveSequence]]:
        by_lease = {load.lease: load for load in self._daemon.loads}
        if not by_lease:
            return
        in_flight = self._daemon.store.in_flight
        for sequence in self._daemon.scheduler.waiting:
            prompt = sequence.queued_prompt
            lease = None if prompt is None else prompt.awaited
            if (
                prompt
                and lease
                and in_flight
                and in_flight.will_be_indexed(lease, prompt.until_tokens)
            ):
                load = by_lease.get(lease)
                if load is not None:
                    yield load, sequence
