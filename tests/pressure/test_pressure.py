"""Memory that other processes take, in a real control group."""

import pytest

from tests.pressure.groups import NoGroups
from tests.pressure.runs import crowded, run

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
