"""The sequences that have come and not ended, by their ids and by their requests."""

from collections.abc import Iterator

from engine.scheduling.sequence import LiveSequence, Status
from engine.step.plan import SequenceId, StepPlan


class LiveSequences:
    """Also knows those of whom nobody can say yet what may follow: see `Matcher`."""

    def __init__(self) -> None:
        self._by_id: dict[SequenceId, LiveSequence] = {}
        self._by_request: dict[str, list[LiveSequence]] = {}
        self._unanswered: dict[SequenceId, LiveSequence] = {}

    def __bool__(self) -> bool:
        return bool(self._by_id)

    @property
    def unanswered(self) -> tuple[LiveSequence, ...]:
        """Those whose guides' matchers have to be answered before they go on."""
        return tuple(self._unanswered.values())

    def get(self, sequence_id: SequenceId) -> LiveSequence | None:
        """None when it is over."""
        return self._by_id.get(sequence_id)

    def of_request(self, request_id: str) -> tuple[LiveSequence, ...]:
        return tuple(self._by_request.get(request_id, ()))

    def add(self, sequence: LiveSequence) -> None:
        self._by_id[sequence.id] = sequence
        self._by_request.setdefault(sequence.request.id, []).append(sequence)

    def remove(self, sequence: LiveSequence) -> None:
        """It ends."""
        del self._by_id[sequence.id]
        self._unanswered.pop(sequence.id, None)
        siblings = self._by_request[sequence.request.id]
        siblings.remove(sequence)
        if not siblings:
            del self._by_request[sequence.request.id]

    def must_be_answered(self, sequence: LiveSequence) -> bool:
        """Whether its matcher has to be; it is remembered then."""
        if sequence.unanswered is None:
            return False
        self._unanswered[sequence.id] = sequence
        return True

    def take_answered(self) -> list[LiveSequence]:
        """Those whose matchers have been answered since they were remembered."""
        answered = [sequence for sequence in self.unanswered if sequence.unanswered is None]
        for sequence in answered:
            del self._unanswered[sequence.id]
        return answered

    def running(self, plan: StepPlan) -> Iterator[tuple[LiveSequence, int]]:
        """Those of a step's sequences that run, and how many tokens it has computed of them.

        Others have ended or given way since the step was planned. Who gave way draws again what it
        has drawn here.
        """
        for sequence_id, n_tokens in plan.rows():
            sequence = self._by_id.get(sequence_id)
            if sequence is not None and sequence.status is Status.RUNNING:
                yield sequence, n_tokens
