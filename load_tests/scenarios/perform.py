"""Any scenario against any server."""

from load_tests.client import Target
from load_tests.scenarios.arrival import Arrived, play_arrival
from load_tests.scenarios.kinds import Arrival, Load, Shares
from load_tests.scenarios.load import Summary, play, summarize
from load_tests.scenarios.shares import Probed, play_shares
from load_tests.scenarios.workloads import build

Outcome = Summary | Arrived | Probed
"""What a scenario came to, played once."""


async def perform(scenario: Load | Arrival | Shares, seed: int, target: Target) -> Outcome:
    """Play it once. Raises TargetError at the first thing that goes wrong."""
    match scenario:
        case Load():
            return summarize(await play(build(scenario, seed), target))
        case Arrival():
            return await play_arrival(scenario, seed, target)
        case Shares():
            return await play_shares(scenario, seed, target)
