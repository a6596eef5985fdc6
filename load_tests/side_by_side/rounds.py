"""Several kinds of server play the same scenario in turn, each run on a fresh process."""

import asyncio
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from load_tests.client import Target, TargetError
from load_tests.peers.catalogue import Peer, Server, living, serving
from load_tests.scenarios.comeback import play_comeback
from load_tests.scenarios.kinds import Comeback, Load, Playable, Restart, Restarting
from load_tests.scenarios.load import play
from load_tests.scenarios.perform import Outcome, perform
from load_tests.scenarios.restart import play_restart
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
    there and described in `failures`.
    """

    rounds: tuple[Mapping[str, Outcome], ...]
    failures: tuple[Failure, ...]


@dataclass(frozen=True, slots=True)
class Bench:
    """Where all run: the checkpoint that they serve and the folder for their logs."""

    model: Path
    logs: Path

    def measure(self, peer: Peer, scenario: Playable | Restarting, seed: int) -> Outcome | Failure:
        """Start the peer, warm it up, play the scenario, stop it."""
        log = self.logs / (re.sub(r"[^\w.]+", "-", peer.name) + ".log")
        try:
            outcome = self._play(peer, scenario, seed, log)
        except TargetError as error:
            logger.warning("  %s failed", peer.name)
            return Failure(peer.name, str(error))
        logger.info("  %s: %s", peer.name, outcome.headline)
        return outcome

    def _play(self, peer: Peer, scenario: Playable | Restarting, seed: int, log: Path) -> Outcome:
        match scenario:
            case Restart():
                return play_restart(scenario, seed, partial(self._live, peer, log))
            case Comeback():
                return play_comeback(scenario, seed, partial(self._live, peer, log))
        with serving(peer, self.model, log) as target:
            _warm_up(target, scenario)
            return asyncio.run(perform(scenario, seed, target))

    @contextmanager
    def _live(self, peer: Peer, log: Path, home: Path) -> Iterator[Server]:
        with living(peer, self.model, home, log) as server:
            _warm_up(server.target, WARM_UP)
            yield server


def play_rounds(
    bench: Bench,
    peers: Sequence[Peer],
    scenario: Playable | Restarting,
    seed: int,
    repeat: int,
) -> Rounds:
    """Measure all `repeat` times, taking turns at going first."""
    rounds: list[dict[str, Outcome]] = []
    failures: list[Failure] = []
    for number in range(repeat):
        first = number % len(peers)
        outcomes: dict[str, Outcome] = {}
        for name, found in _round(bench, [*peers[first:], *peers[:first]], scenario, seed):
            if isinstance(found, Failure):
                failures.append(found)
            else:
                outcomes[name] = found
        rounds.append(outcomes)
    return Rounds(tuple(rounds), tuple(failures))


def _round(
    bench: Bench, peers: Sequence[Peer], scenario: Playable | Restarting, seed: int
) -> Iterator[tuple[str, Outcome | Failure]]:
    for peer in peers:
        yield peer.name, bench.measure(peer, scenario, seed)


def _warm_up(target: Target, scenario: Playable) -> None:
    """With a small image where the scenario has any."""
    has_images = isinstance(scenario, Load) and scenario.image_sets > 0
    work = {"image_sets": 2, "image_tokens": 64} if has_images else {}
    asyncio.run(play(build(WARM_UP.model_copy(update=work), WARM_UP_SEED), target))
