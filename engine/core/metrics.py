"""What the engine counts, and how long requests wait and tokens take."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from engine.api import Telemetry
from engine.core.sequence import LiveSequence
from engine.values.output import OutputEvent
from engine.values.request import Request
from engine.values.stats import DraftCounts, DraftSource


def _no_drafts() -> dict[DraftSource, DraftCounts]:
    return dict.fromkeys(DraftSource, DraftCounts())


@dataclass(slots=True)
class SchedulerCounters:
    computed_prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0  # for lack of blocks
    client_preemptions: int = 0  # so that another client's sequence could be admitted
    steps: int = 0
    rows_sat_out: int = 0  # rows that waited for a mask, a step each
    drafts: dict[DraftSource, DraftCounts] = field(default_factory=_no_drafts)

    def count_draft(self, source: DraftSource, drafted_tokens: int, accepted_tokens: int) -> None:
        """A step has verified a draft."""
        self.drafts[source] = self.drafts[source].plus(drafted_tokens, accepted_tokens)


@dataclass(slots=True)
class AdmissionCounters:
    """A sequence counts when it is first admitted."""

    queried_prompt_tokens: int = 0  # of those that may adopt
    cached_prompt_tokens: int = 0


PACE_WINDOW = 16
"""How many of the last departures from the queue are looked back on."""


class QueuePace:
    """Seconds between the last departures from the queue, on a clock that its caller reads.

    Only time in which a sequence waits counts: a quiet night tells nothing of the next burst.
    """

    def __init__(self) -> None:
        self._waiting = 0
        self._read_seconds = 0.0  # of the caller's clock, when last told
        self._waited_seconds = 0.0  # in which a sequence waited
        self._departures = deque([0.0], maxlen=PACE_WINDOW + 1)  # in waited seconds, after a start

    def joined(self, n: int, now: float) -> None:
        self._read(now)
        self._waiting += n

    def left(self, now: float) -> None:
        self._read(now)
        self._waiting -= 1
        self._departures.append(self._waited_seconds)

    def seconds_until_left(self, n: int, now: float) -> float:
        """The time that n departures take if they go on as the last ones did, until now."""
        self._read(now)
        n_departures = max(len(self._departures) - 1, 1)
        return n * (self._waited_seconds - self._departures[0]) / n_departures

    def _read(self, now: float) -> None:
        if self._waiting:
            self._waited_seconds += now - self._read_seconds
        self._read_seconds = now


@dataclass(slots=True)
class _Times:
    """When one sequence arrived and last produced a token, in seconds of the loop's clock."""

    arrived: float
    last_token: float | None = None


class LatencyTracker:
    """Follows each sequence from its arrival to its last event."""

    def __init__(self, clock: Callable[[], float], telemetry: Telemetry) -> None:
        self._clock = clock
        self._telemetry = telemetry
        self._times: dict[tuple[str, int], _Times] = {}
        self._unscheduled: set[tuple[str, int]] = set()
        self._pace = QueuePace()
        self.first_tokens = 0
        self.first_token_seconds = 0.0  # from arrival, of all of them together

    def now(self) -> float:
        return self._clock()

    def arrived(self, request: Request, seconds: float) -> None:
        for index in range(request.n):
            self._times[request.id, index] = _Times(seconds)
            self._unscheduled.add((request.id, index))
        self._pace.joined(request.n, self._clock())

    def seconds_until_left(self, n: int) -> float:
        """An estimate of how long it takes until n more sequences have left the queue."""
        return self._pace.seconds_until_left(n, self._clock())

    def scheduled(self, running: Iterable[LiveSequence]) -> None:
        """These are in the step that is about to begin."""
        if not self._unscheduled:
            return
        now = self._clock()
        for sequence in running:
            key = sequence.request.id, sequence.index
            if key in self._unscheduled:
                self._leave_queue(key, now)
                self._telemetry.queue_wait(now - self._times[key].arrived)

    def stepped(self, seconds: float) -> None:
        """A step has been collected that had the device for so long."""
        self._telemetry.step(seconds)

    def emitted(self, events: Iterable[OutputEvent]) -> None:
        now = self._clock()
        for event in events:
            key = event.request_id, event.index
            times = self._times[key]
            if event.token_ids:
                self._token(times, now)
            if event.finish_reason is not None:
                self._telemetry.finished(now - times.arrived)
                if key in self._unscheduled:
                    self._leave_queue(key, now)
                del self._times[key]

    def _leave_queue(self, key: tuple[str, int], now: float) -> None:
        self._unscheduled.remove(key)
        self._pace.left(now)

    def _token(self, times: _Times, now: float) -> None:
        if times.last_token is None:
            self.first_tokens += 1
            self.first_token_seconds += now - times.arrived
            self._telemetry.first_token(now - times.arrived)
        else:
            self._telemetry.token_gap(now - times.last_token)
        times.last_token = now
