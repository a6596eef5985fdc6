"""The jobs of one grammar process, and which of them is at fault when it ends."""

import signal
from collections import Counter
from dataclasses import dataclass

from engine.grammar.remote.process import ENDED_BY_OTHERS
from engine.grammar.remote.wire import EXCEPTION_EXIT

OUT_OF_MEMORY = frozenset({-signal.SIGABRT, EXCEPTION_EXIT})
"""Exit codes where there is no more: of Rust, and of Python."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a process says when it begins one: `number` is the matcher's. The job may take `seconds`
    of the processor, and `bytes_left` are left of the memory that all matchers share.
    """

    number: int
    client: str
    seconds: float
    bytes_left: int


class Jobs:
    """What a process has begun, and how much memory each open matcher has taken.

    A job names its client itself: who has gone meanwhile is still to be found.
    """

    def __init__(self) -> None:
        self.running: Job | None = None
        self._first: Job | None = None
        self._last: Job | None = None
        self._open: dict[int, Job] = {}
        self._taken = Counter[int]()

    def begin(self, job: Job) -> None:
        self._first = self._first or job
        if self._last is not None and self._last.number in self._open:
            taken = self._last.bytes_left - job.bytes_left
            self._taken[self._last.number] += max(0, taken)
        self._open[job.number] = self._last = self.running = job

    def end(self) -> None:
        """The job that was running is done."""
        self.running = None

    def close(self, number: int) -> None:
        """The matcher is let go."""
        self._open.pop(number, None)
        self._taken.pop(number, None)

    def culprit(self, exit_code: int | None) -> Job | None:
        """The job that has ended the process; None where no job is at fault."""
        if exit_code == ENDED_BY_OTHERS:
            return None
        if exit_code in OUT_OF_MEMORY:
            return self._largest()
        return self.running

    def _largest(self) -> Job | None:
        """The largest matcher of the client that has taken most memory. The running job has asked
        for more than was left. None where most has been taken by matchers that are closed.
        """
        if self._first is None or self.running is None:
            return None
        jobs = {**self._open, self.running.number: self.running}
        taken = self._taken.copy()
        taken[self.running.number] += self.running.bytes_left
        of_clients = Counter[str]()
        for number, job in jobs.items():
            of_clients[job.client] += taken[number]
        if self._first.bytes_left - taken.total() > max(of_clients.values()):
            return None
        return max(jobs.values(), key=lambda job: (of_clients[job.client], taken[job.number]))
