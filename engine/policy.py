"""Who goes first and who gives way. Pure functions."""

from collections.abc import Iterable

from engine.sequence import LiveSequence


def admission_key(sequence: LiveSequence) -> tuple[int, int]:
    """Sort key of a client's line in the queue, and of a step: by priority, then by arrival."""
    return sequence.request.priority, sequence.id


def victim(candidates: Iterable[LiveSequence]) -> LiveSequence:
    """Who is preempted: the lowest priority, then the least progress lost, then the latest."""
    return max(candidates, key=lambda s: (s.request.priority, -s.computed_tokens, s.id))
