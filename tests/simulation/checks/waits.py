"""Whether what a sequence is said to wait for is there."""

from engine.core.sequence import LiveSequence
from engine.values.request import WaitReason
from tests.simulation.census import Census, Happening
from tests.simulation.daemon import Daemon

HAPPENINGS = {
    WaitReason.SLOTS: Happening.WAITS_FOR_SLOTS,
    WaitReason.MEMORY: Happening.WAITS_FOR_MEMORY,
    WaitReason.TWIN: Happening.WAITS_FOR_TWIN,
    WaitReason.DISK: Happening.WAITS_FOR_DISK,
    WaitReason.TURN: Happening.WAITS_FOR_TURN,
}


class WaitCheck:
    """Asks of every live sequence why it waits, between two turns."""

    def __init__(self, daemon: Daemon, census: Census) -> None:
        self._daemon = daemon
        self._census = census
        self._n_releases = 0  # of the pool, after the turn before

    def check(self) -> None:
        scheduler = self._daemon.scheduler
        assert all(scheduler.wait_reason(sequence) is None for sequence in scheduler.running)
        for sequence in scheduler.waiting:
            reason = scheduler.wait_reason(sequence)
            assert reason is not None, "it neither runs nor waits for anything"
            self._check(sequence, reason)
            self._census[HAPPENINGS[reason]] += 1
        self._n_releases = self._daemon.pool.n_releases

    def _check(self, sequence: LiveSequence, reason: WaitReason) -> None:
        daemon, scheduler = self._daemon, self._daemon.scheduler
        match reason:
            case WaitReason.SLOTS:
                n_running = len(scheduler.running)
                is_there = n_running >= daemon.limits.max_running - 1  # one may be kept
            case WaitReason.MEMORY:
                released = daemon.pool.n_releases > self._n_releases  # since it was refused
                is_there = released or daemon.pool.n_referenced > 0
            case WaitReason.TWIN:
                is_there = any(self._is_twin(sequence, other) for other in scheduler.running)
                is_there = is_there or (sequence.first is not None and sequence.first.is_live)
            case WaitReason.DISK:
                is_there = daemon.loader is not None  # loads may have ended since it was put off
            case WaitReason.TURN:
                is_there = True
        assert is_there, f"it does not wait for {reason}"

    def _is_twin(self, sequence: LiveSequence, other: LiveSequence) -> bool:
        """Whether their first blocks are the same."""
        size = self._daemon.store.block_size
        is_alike = sequence.tokens.packed(0, size) == other.tokens.packed(0, size)
        return is_alike and sequence.namespace == other.namespace
