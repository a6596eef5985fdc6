"""How long things took, told to a Telemetry."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from engine.api import Telemetry
from engine.scheduling.sequence import LiveSequence
from engine.types.output import OutputEvent
from engine.types.request import Request
from engine.watching.pace import QueuePace


@dataclass(slots=True)
class _Life:
    """When one sequence arrived and last produced a token, in seconds of the loop's clock."""

    arrived: float
    last_token: float | None = None


class Timing:
    """Follows each sequence from its arrival to its last event."""

    def __init__(self, clock: Callable[[], float], telemetry: Telemetry) -> None:
        self._clock = clock
        self._telemetry = telemetry
        self._lives: dict[tuple[str, int], _Life] = {}
        self._unscheduled: set[tuple[str, int]] = set()
        self._pace = QueuePace()
        self.first_tokens = 0
        self.first_token_seconds = 0.0  # from arrival, of all of them together

    def now(self) -> float:
        return self._clock()

    def arrived(self, request: Request, seconds: float) -> None:
        for index in range(request.n):
            self._lives[request.id, index] = _Life(seconds)
            self._unscheduled.add((request.id, index))
        self._pace.joined(request.n, self._clock())

    def seconds_until_left(self, n: int) -> float:
        """An estimate of how long it takes until n more sequences have left the queue."""
        return self._pace.seconds_until_left(n, self._clock())

    def age_seconds(self, sequence: LiveSequence) -> float:
        return self._clock() - self._lives[sequence.request.id, sequence.index].arrived

    def scheduled(self, running: Iterable[LiveSequence]) -> None:
        """These are in the step that is about to begin."""
        if not self._unscheduled:
            return
        now = self._clock()
        for sequence in running:
            key = sequence.request.id, sequence.index
            if key in self._unscheduled:
                self._leave_queue(key, now)
                self._telemetry.queue_wait(now - self._lives[key].arrived)

    def stepped(self, seconds: float) -> None:
        """A step has been collected that had the device for so long."""
        self._telemetry.step(seconds)

    def emitted(self, events: Iterable[OutputEvent]) -> None:
        now = self._clock()
        for event in events:
            key = event.request_id, event.index
            life = self._lives[key]
            if event.token_ids:
                self._token(life, now)
            if event.finish_reason is not None:
                self._telemetry.finished(now - life.arrived)
                if key in self._unscheduled:
                    self._leave_queue(key, now)
                del self._lives[key]

    def _leave_queue(self, key: tuple[str, int], now: float) -> None:
        self._unscheduled.remove(key)
        self._pace.left(now)

    def _token(self, life: _Life, now: float) -> None:
        if life.last_token is None:
            self.first_tokens += 1
            self.first_token_seconds += now - life.arrived
            self._telemetry.first_token(now - life.arrived)
        else:
            self._telemetry.token_gap(now - life.last_token)
        life.last_token = now
