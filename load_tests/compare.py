"""Two kinds of server play the same scenarios in turn, each run on a fresh process."""

import asyncio
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from load_tests.client import TargetError, play
from load_tests.peers import Peer, serving
from load_tests.report import Summary, summarize
from load_tests.workloads import Scenario, Workload, build

logger = logging.getLogger(__name__)

WARM_UP = Scenario(
    description="what a fresh process does once: the first forward, the first batch",
    concurrency=2,
    conversations=2,
    user_words=32,
    output_tokens=4,
)
WARM_UP_SEED = 2**31  # no measured workload shares its texts


@dataclass(frozen=True, slots=True)
class Failure:
    """A run that came to nothing."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """One scenario's runs, in pairs: `ours[i]` and `theirs[i]` ran one after the other.

    A pair in which either side failed is only in `failures`.
    """

    ours: tuple[Summary, ...]
    theirs: tuple[Summary, ...]
    failures: tuple[Failure, ...]


@dataclass(frozen=True, slots=True)
class Bench:
    """Where both sides run: the checkpoint that they serve and the folder for their logs."""

    model: Path
    logs: Path

    def measure(self, peer: Peer, workload: Workload) -> Summary | Failure:
        """Start the peer, warm it up, play the workload, stop it."""
        log = self.logs / (re.sub(r"[^\w.]+", "-", peer.name) + ".log")
        try:
            with serving(peer, self.model, log) as target:
                asyncio.run(play(build(WARM_UP, WARM_UP_SEED), target))
                summary = summarize(asyncio.run(play(workload, target)))
                logger.info("%s: %.2f s", peer.name, summary.wall_seconds)
                return summary
        except TargetError as error:
            logger.warning("%s failed", peer.name)
            return Failure(peer.name, str(error))


def compare(bench: Bench, ours: Peer, theirs: Peer, workload: Workload, repeat: int) -> Comparison:
    """Measure both `repeat` times, taking turns at going first."""
    pairs = list(_pairs(bench, (ours, theirs), workload, repeat))
    whole = [(a, b) for a, b in pairs if isinstance(a, Summary) and isinstance(b, Summary)]
    return Comparison(
        ours=tuple(a for a, _ in whole),
        theirs=tuple(b for _, b in whole),
        failures=tuple(run for pair in pairs for run in pair if isinstance(run, Failure)),
    )


def _pairs(
    bench: Bench, peers: tuple[Peer, Peer], workload: Workload, repeat: int
) -> Iterator[tuple[Summary | Failure, Summary | Failure]]:
    for i in range(repeat):
        if i % 2 == 0:
            first = bench.measure(peers[0], workload)
            yield first, bench.measure(peers[1], workload)
        else:
            first = bench.measure(peers[1], workload)
            yield bench.measure(peers[0], workload), first
