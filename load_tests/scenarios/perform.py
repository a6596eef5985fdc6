"""Any scenario that needs no more than a server."""

from load_tests.client import Target
from load_tests.scenarios.arrival import Arrived, play_arrival
from load_tests.scenarios.comeback import CameBack
from load_tests.scenarios.kinds import Arrival, Load, Playable, Text
from load_tests.scenarios.load import Summary, play, summarize
from load_tests.scenarios.real_text import Answered, answered, build_text
from load_tests.scenarios.restart import Restarted
from load_tests.scenarios.workloads import build

Outcome = Summary | Answered | Arrived | Restarted | CameBack
"""What a scenario came to, played once."""


async def perform(scenario: Playable, seed: int, target: Target) -> Outcome:
    """Play it once. Raises TargetError at the first thing that goes wrong."""
    match scenario:
        case Load():
            return summarize(await play(build(scenario, seed), target))
        case Text():
            workload = build_text(scenario)
            return answered(workload, await play(workload, target))
        case Arrival():
            return await play_arrival(scenario, seed, target)
