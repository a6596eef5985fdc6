"""Kill a writer of the disk tier at random moments: `python -m tests.tier_kills --kills 100`.

A child writes chains and says which it has flushed; it is killed with SIGKILL while it goes on.
Then everything that it had flushed is read and checked, and so is every record that there is. The
children of a run share one directory, so each begins with what the last left, and evicts.
"""

import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from kvstore.tier import maintenance
from kvstore.tier.tier import DiskTier
from tests.tier_harness import LIMITS, PATIENCE, Chain, allocated, entry, read

N_BYTES, LENGTH = 8_192, 20
MOST_CHAINS = 20  # 4 MB: what a child has written is not evicted by itself


def write(directory: Path, life: int) -> None:
    """The child: until it has written all, which it seldom may."""
    tier = DiskTier.open(directory, "model", LIMITS)
    for number, chain in enumerate(chains(life)):
        for start in range(0, LENGTH, 5):
            tier.offer(chain.extent(start, start + 5))
        tier.flush(PATIENCE)
        print(number, flush=True)
        if number % 7 == 6:
            tier.forget(chain.names[10])


def chains(life: int) -> Iterator[Chain]:
    return (Chain(f"{life}/{number}", LENGTH, N_BYTES) for number in range(MOST_CHAINS))


def live_and_die(directory: Path, life: int, randomness: random.Random) -> int:
    """One child, and the examination of what it leaves. How many chains it had flushed."""
    program = f"from tests.tier_kills import *; write(Path({str(directory)!r}), {life})"
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    said = [child.stdout.readline() for _ in range(randomness.randrange(MOST_CHAINS))]
    time.sleep(randomness.random() / 100)
    child.kill()
    said += child.stdout.readlines()
    child.stdout.close()
    assert child.wait() in (0, -signal.SIGKILL), "it fell over by itself"
    n_flushed = len([line for line in said if line.endswith("\n")])
    examine(directory, life, n_flushed)
    return n_flushed


def examine(directory: Path, life: int, n_flushed: int) -> None:
    assert allocated(directory) <= LIMITS.max_bytes
    tier = DiskTier.open(directory, "model", LIMITS)
    for number, chain in enumerate(chains(life)):
        n_known = tier.known(chain.names)
        least = 0 if number >= n_flushed else 10 if number % 7 == 6 else LENGTH
        assert n_known >= least, f"chain {number} of {n_flushed} has lost entries"
        found = read(tier, chain.names[:n_known])
        assert found == ([entry(name, N_BYTES) for name in chain.names[:n_known]], None)
    assert tier.stats().counters.faults == ()
    assert not list(tier.problems())
    tier.close()
    assert all(check.is_sound for check in maintenance.verify(directory))


def run(n_kills: int, seed: int) -> None:
    randomness = random.Random(seed)
    with TemporaryDirectory(prefix="tier-kills-") as directory:
        for life in range(n_kills):
            n_flushed = live_and_die(Path(directory), life, randomness)
            print(f"seed {seed}, life {life}: killed after {n_flushed} chains, nothing lost")


def main(
    kills: Annotated[int, typer.Option()] = 100, seed: Annotated[int, typer.Option()] = 1
) -> None:
    run(kills, seed)


if __name__ == "__main__":
    typer.run(main)
