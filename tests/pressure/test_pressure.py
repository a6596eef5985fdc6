"""Memory that other processes take, in a real control group."""

import pytest

from tests.polling import until
from tests.pressure.groups import NoGroups
from tests.pressure.runs import crowded, growing, growing_bytes, run

RUNS = 3
"""`make pressure` has fifty."""


@pytest.mark.slow
@pytest.mark.process
def test_a_daemon_outlives_processes_that_grow() -> None:
    try:
        with crowded(1) as (group, daemon, limit):
            for seed in range(RUNS):
                ends = run(group, daemon, limit, seed)
                assert ends["whole"], ends
    except NoGroups as reason:
        pytest.skip(str(reason))


@pytest.mark.slow
@pytest.mark.process
def test_without_the_guard_the_kernel_ends_a_process() -> None:
    """Or the other test would show nothing."""
    try:
        with crowded(1, "--memory-guard=1") as (group, _, limit):
            kills = group.group.kills()
            with growing(group, growing_bytes(limit)):
                until(group.group.kills, lambda n: n > kills)
    except NoGroups as reason:
        pytest.skip(str(reason))
