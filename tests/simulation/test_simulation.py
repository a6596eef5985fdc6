"""Every count right and every output as when alone, whatever happens around it."""

import logging
from collections.abc import Callable, Iterator

import pytest

from engine.policy import admission_key
from engine.sequence import LiveSequence
from engine.waiting import WaitingQueue
from tests.simulation.simulator import run

STEPS = 120


@pytest.mark.parametrize("seed", range(40))
def test_outputs_and_counts_hold_under_random_load(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL + 1)  # the faults are injected
    assert run(seed, STEPS) > 0


def test_first_come_first_served_is_found_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def by_arrival(
        queue: WaitingQueue, may_start: Callable[[LiveSequence], bool]
    ) -> Iterator[LiveSequence]:
        everyone = [*queue._preempted, *(s for line in queue._lines.values() for s in line)]
        return filter(may_start, sorted(everyone, key=admission_key))

    caplog.set_level(logging.CRITICAL + 1)
    monkeypatch.setattr(WaitingQueue, "turns", by_arrival)
    with pytest.raises(AssertionError, match="waited for its turn"):
        sum(run(seed, STEPS) for seed in range(40))
