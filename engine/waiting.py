"""The queue of sequences that are not running."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from engine.policy import admission_key
from engine.sequence import Sequence


class WaitingQueue:
    """Sequences in the order of `admission_key`."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """Over a snapshot: the queue may change meanwhile."""
        return iter(tuple(self._sequences))

    def add(self, sequence: Sequence) -> None:
        insort(self._sequences, sequence, key=admission_key)

    def remove(self, sequence: Sequence) -> None:
        """Raises ValueError when the sequence does not wait."""
        at = bisect_left(self._sequences, admission_key(sequence), key=admission_key)
        if at == len(self._sequences) or self._sequences[at] is not sequence:
            raise ValueError(f"sequence {sequence.id} does not wait")
        del self._sequences[at]
