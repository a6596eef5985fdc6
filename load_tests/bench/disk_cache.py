"""What the disk cache costs with many extents. No model.

    python -m load_tests.bench.disk_cache [--json PATH]

A folder of small extents is opened. Then a thread repeats a stand-in for a decode step, calls that
release the GIL and some Python between them, in groups. Before every other group the writer's
thread is given work: a block to write, or its upkeep, which it runs every ten seconds. Of each
place in a group, the median over all groups counts: single steps of a virtual machine have pauses,
in which other machines had the processor, and these hit both kinds of groups. `longest` is the
slowest place next to the work, over the median step without. `in all` is what the steps of a group
take longer for the work. `processor` is the time of the writer's thread for it, which bounds how
long steps can wait for the GIL, on a busy machine as well.
"""

import hashlib
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from blake3 import blake3

from kvstore.disk.extent import encode
from kvstore.disk.store import DiskStore
from kvstore.disk.types import DiskLimits, Entry, EntryHead
from kvstore.tokens import Digest
from load_tests.report import Table
from load_tests.terminal import show_figures

EXTENTS = (1_000, 10_000, 50_000, 100_000)
LIMITS = DiskLimits(1 << 40, least_free=0.0)
PARTS = (b"x" * 64,)
STEP_CALLS, HASHED, BETWEEN = 60, b"x" * (32 << 10), 500
"""Of a step: calls that release the GIL, on one core each, what they hash, and additions in Python
after each."""

GROUP_STEPS = 20
"""Steps after the writer has been given work, which takes a few of them."""


@dataclass(frozen=True, slots=True)
class Delay:
    """What work of the writer's thread costs the steps that begin with it."""

    longest: float  # the slowest of them over the median step without
    milliseconds: float  # that all of them take longer
    processor_milliseconds: float  # of the writer's thread for the work, the median


@dataclass(frozen=True, slots=True)
class Figures:
    extents: int
    open_seconds: float
    step_milliseconds: float  # alone, the median
    delays: dict[str, Delay]


def named(*seed: object) -> Digest:
    return Digest(blake3(repr(seed).encode()).digest())


ROOT = named("root")


def fill(directory: Path, n_extents: int) -> None:
    """Store extents below one root, each used a second after the one before."""
    DiskStore.open(directory, "model", LIMITS).close()
    [folder] = directory.glob("v3-*")
    began = time.time() - n_extents
    for number in range(n_extents):
        _, header = encode(ROOT, ROOT, [Entry(named(number), 32, PARTS)])
        path = folder / f"{number:016x}.kv"
        path.write_bytes(b"".join((header, *PARTS)))
        os.utime(path, (began + number,) * 2)


def steps() -> list[float]:
    """The milliseconds of a group of steps."""
    found = list[float]()
    for _ in range(GROUP_STEPS):
        began = time.perf_counter()
        for _ in range(STEP_CALLS):
            hashlib.blake2b(HASHED)
            sum(range(BETWEEN))
        found.append(1e3 * (time.perf_counter() - began))
    return found


def measure(n_extents: int, groups: int) -> Figures:
    with tempfile.TemporaryDirectory(prefix="disk-cache-") as name:
        fill(Path(name), n_extents)
        began = time.perf_counter()
        disk = DiskStore.open(Path(name), "model", LIMITS)
        open_seconds, n_written = time.perf_counter() - began, 0

        def write() -> None:
            nonlocal n_written
            n_written += 1
            reservation = disk.reserve(ROOT, ROOT, EntryHead(named("new", n_written), 32, (64,)))
            assert reservation is not None
            disk.write(reservation, PARTS)
            disk.flush(0.0)  # it need not wait for more of its path

        turns = list[float]()
        turn = disk._writer.turn

        def timed_turn() -> None:
            began = time.thread_time()
            turn()
            turns.append(1e3 * (time.thread_time() - began))

        disk._writer.turn = timed_turn  # type: ignore[method-assign]
        steps()
        works = {"a write": write, "upkeep": disk.upkeep}
        processor = {name: list[float]() for name in works}
        beside, alone = {name: list[list[float]]() for name in works}, list[list[float]]()
        for _ in range(groups):
            for kind, work in works.items():
                work()
                beside[kind].append(steps())
                alone.append(steps())
                processor[kind].append(sum(turns))
                turns.clear()
        disk.close()
    typical = float(np.median(alone))
    delays = dict[str, Delay]()
    for name, found in beside.items():
        places = np.median(found, axis=0)
        more = np.median(np.sum(found, axis=1)) - np.median(np.sum(alone, axis=1))
        cost = float(np.median(processor[name]))
        delays[name] = Delay(float(places.max() / typical), float(more), cost)
    return Figures(n_extents, open_seconds, typical, delays)


def table(all_figures: list[Figures]) -> Table:
    names = all_figures[0].delays
    columns = (
        "extents",
        "open s",
        "step ms",
        *(f"{name}: longest, in all, processor" for name in names),
    )
    rows = (
        (
            f"{figures.extents:,}",
            f"{figures.open_seconds:.2f}",
            f"{figures.step_milliseconds:.2f}",
            *(
                f"{its.longest:.2f}, {its.milliseconds:.2f} ms, {its.processor_milliseconds:.2f} ms"
                for its in figures.delays.values()
            ),
        )
        for figures in all_figures
    )
    return Table(columns, tuple(rows))


def main(
    groups: int = 60,
    extents: list[int] | None = None,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure the disk cache with several numbers of extents."""
    all_figures = [measure(n_extents, groups) for n_extents in extents or EXTENTS]
    show_figures(table(all_figures), all_figures, json_path)


if __name__ == "__main__":
    typer.run(main)
