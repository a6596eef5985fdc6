"""Kill writers of the disk store at random moments: `python -m tests.disk_store_kills --kills 100`.

Two children, with a model each, write chains into one directory at the same time and say which they
have flushed; they are killed with SIGKILL while they go on. Then all that they had flushed is read
and checked, and so is every record that there is. Each pair begins with what the last left, and
evicts it: what is older goes first, whosever it is.
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

from kvstore.disk import store as maintenance
from kvstore.disk.folder import WRITE_LOCK, FileLock
from kvstore.disk.store import DiskStore
from tests.disk_store_harness import DAEMON, LIMITS, PATIENCE, Chain, allocated, entry, offer, read

N_BYTES, LENGTH = 8_192, 20
MOST_CHAINS = 14  # 3 MB: what two children have written is not evicted by themselves
MODELS = ("one", "another")


def write(directory: Path, model: str, life: int) -> None:
    """The child: until it has written all, which it seldom may."""
    tier = DiskStore.open(directory, model, LIMITS, daemon=DAEMON)
    for number, chain in enumerate(chains(model, life)):
        for start in range(0, LENGTH, 5):
            offer(tier, chain.extent(start, start + 5))
        tier.flush(PATIENCE)
        print(number, flush=True)
        if number % 7 == 6:
            tier.forget(chain.names[10])


def chains(model: str, life: int) -> Iterator[Chain]:
    return (Chain(f"{model}/{life}/{number}", LENGTH, N_BYTES) for number in range(MOST_CHAINS))


def live_and_die(directory: Path, life: int, randomness: random.Random) -> list[int]:
    """Two children, and the examination of what they leave. How many chains each had flushed."""
    children = {model: born(directory, model, life) for model in MODELS}
    said = dict.fromkeys(MODELS, 0)
    for model in MODELS:
        for _ in range(randomness.randrange(MOST_CHAINS)):
            said[model] += hears(children[model])
            assert size_between_writes(directory) <= LIMITS.max_bytes
    for model in randomness.sample(MODELS, len(MODELS)):
        time.sleep(randomness.random() / 100)
        children[model].kill()
    for model, child in children.items():
        while hears(child):
            said[model] += 1
        assert child.wait() in (0, -signal.SIGKILL), "it fell over by itself"
        child.communicate()
    assert allocated(directory) <= LIMITS.max_bytes
    for model, n_flushed in said.items():
        examine(directory, model, life, n_flushed)
    return list(said.values())


def born(directory: Path, model: str, life: int) -> "subprocess.Popen[str]":
    program = (
        f"from tests.disk_store_kills import *; write(Path({str(directory)!r}), {model!r}, {life})"
    )
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)


def hears(child: "subprocess.Popen[str]") -> bool:
    """Whether another chain was flushed; False when the child has ended."""
    assert child.stdout is not None
    return child.stdout.readline().endswith("\n")


def size_between_writes(directory: Path) -> int:
    """While nobody writes: what moves would be counted twice, or not at all."""
    lock = FileLock(directory / WRITE_LOCK)
    try:
        with lock:
            return allocated(directory)
    finally:
        lock.close()


def examine(directory: Path, model: str, life: int, n_flushed: int) -> None:
    tier = DiskStore.open(directory, model, LIMITS)
    for number, chain in enumerate(chains(model, life)):
        n_known = tier.known(chain.names)
        least = 0 if number >= n_flushed or number % 7 == 6 else LENGTH
        assert n_known >= least, f"chain {number} of {n_flushed} has lost entries"
        found = read(tier, chain.names[:n_known])
        assert found == ([entry(name, N_BYTES) for name in chain.names[:n_known]], None)
    assert tier.stats().counters.faults == {}
    assert not list(tier.problems())
    tier.close()
    assert all(check.is_sound for check in maintenance.verify(directory))


def run(n_kills: int, seed: int) -> None:
    randomness = random.Random(seed)
    with TemporaryDirectory(prefix="tier-kills-") as directory:
        for life in range(n_kills):
            n_flushed = live_and_die(Path(directory), life, randomness)
            flushed = " and ".join(map(str, n_flushed))
            print(f"seed {seed}, life {life}: killed after {flushed} chains, nothing lost")


def main(
    kills: Annotated[int, typer.Option()] = 100, seed: Annotated[int, typer.Option()] = 1
) -> None:
    run(kills, seed)


if __name__ == "__main__":
    typer.run(main)
