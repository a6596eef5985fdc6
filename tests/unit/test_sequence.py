"""A sequence refuses what its status does not allow."""

import pytest

from engine.sequence import LEGAL_TRANSITIONS, IllegalTransitionError, Status
from tests.unit.engine_harness import Harness, prompt


def test_a_waiting_sequence_has_nothing_to_give_up() -> None:
    harness = Harness()
    sequence = harness.sequence(harness.add(prompt(1, 5)))
    with pytest.raises(IllegalTransitionError, match="WAITING"):
        sequence.preempt()


def test_nothing_follows_the_end() -> None:
    harness = Harness()
    sequence = harness.sequence(harness.add(prompt(1, 5)))
    sequence.finish()
    with pytest.raises(IllegalTransitionError, match="FINISHED -> FINISHED"):
        sequence.finish()


def test_every_status_but_the_last_can_end() -> None:
    for status, followers in LEGAL_TRANSITIONS.items():
        assert (Status.FINISHED in followers) == (status is not Status.FINISHED)
