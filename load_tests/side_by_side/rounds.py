"""Several kinds of server play the same scenario in turn, each run on a fresh process."""

import asyncio
import logging
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from load_tests.bench.floor import Floor
from load_tests.client import TargetError
from load_tests.peers.catalogue import Peer, serving
from load_tests.scenarios.kinds import Arrival, Load, Shares
from load_tests.scenarios.load import play
from load_tests.scenarios.perform import Outcome, perform
from load_tests.scenarios.workloads import build

logger = logging.getLogger(__name__)

WARM_UP = Load(
    description="what a fresh process does once: the first forward, the first batch",
    concurrency=2,
    conversations=2,
    user_words=32,
    output_tokens=4,
)
WARM_UP_SEED = 2**31  # no measured scenario shares its texts


@dataclass(frozen=True, slots=True)
class Failure:
    """A run that came to nothing."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class Rounds:
    """What the peers did, by name, one run of each in every round. A run that failed is missing
    there and told of in `failures`.
    """

    rounds: tuple[Mapping[str, Outcome], ...]
    failures: tuple[Failure, ...]
    floors: tuple[Floor, ...] = ()  # one for each round, where the scenario has a floor


@dataclass(frozen=True, slots=True)
class Bench:
    """Where all run: the checkpoint that they serve and the folder for their logs."""

    model: Path
    logs: Path

    def measure(
        self, peer: Peer, scenario: Load | Arrival | Shares, seed: int
    ) -> Outcome | Failure:
        """Start the peer, warm it up, play the scenario, stop it."""
        log = self.logs / (re.sub(r"[^\w.]+", "-", peer.name) + ".log")
        try:
            with serving(peer, self.model, log) as target:
                asyncio.run(play(build(WARM_UP, WARM_UP_SEED), target))
                outcome = asyncio.run(perform(scenario, seed, target))
                logger.info("  %s: %s", peer.name, outcome.headline)
                return outcome
        except TargetError as error:
            logger.warning("  %s failed", peer.name)
            return Failure(peer.name, str(error))


def play_rounds(
    bench: Bench,
    peers: Sequence[Peer],
    scenario: Load | Arrival | Shares,
    seed: int,
    repeat: int,
) -> Rounds:
    """Measure all `repeat` times, taking turns at going first."""
    rounds: list[dict[str, Outcome]] = []
    failures: list[Failure] = []
    floors: list[Floor] = []
    for i in range(repeat):
        outcomes: dict[str, Outcome] = {}
        for place in range(len(peers)):
            peer = peers[(place + i) % len(peers)]
            match bench.measure(peer, scenario, seed):
                case Failure() as failure:
                    failures.append(failure)
                case outcome:
                    outcomes[peer.name] = outcome
        rounds.append(outcomes)
        if isinstance(scenario, Load) and scenario.has_floor:
            floors.append(_floor(bench.model, scenario, seed))
    return Rounds(tuple(rounds), tuple(failures), tuple(floors))


def _floor(model: Path, scenario: Load, seed: int) -> Floor:
    """By a process of its own: MLX stays out of the client's."""
    module = ("-m", "load_tests.bench.floor")
    command = [sys.executable, *module, str(model), scenario.model_dump_json(), f"--seed={seed}"]
    found = subprocess.run(command, check=True, capture_output=True)
    floor = TypeAdapter(Floor).validate_json(found.stdout)
    logger.info("  floor: %.2f s", floor.seconds)
    return floor
