"""What the disk cache costs with many extents. No model.

    python -m load_tests.bench.disk_cache [--json PATH]

A folder of small extents is opened. Then a thread repeats a stand-in for a decode step, calls that
release the GIL and some Python between them, in rounds of three: alone, while blocks are written,
and while the writer runs its upkeep far more often than every ten seconds. What the rounds differ
in is how long steps wait for the writer's thread. Percentiles are over all rounds.
"""

import os
import tempfile
import time
from collections.abc import Callable
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
STEP_CALLS, SIDE, BETWEEN = 60, 160, 500
"""Of a step: matrix products, the side of their matrices, and additions in Python after each."""

UPKEEP_EVERY_SECONDS, WRITE_EVERY_SECONDS = 0.25, 0.05


@dataclass(frozen=True, slots=True)
class Figures:
    extents: int
    open_seconds: float
    step_milliseconds: dict[str, tuple[float, float]]  # 50th and 99th percentile of each round


def named(*seed: object) -> Digest:
    return Digest(blake3(repr(seed).encode()).digest())


ROOT = named("root")


def fill(directory: Path, n_extents: int) -> None:
    """Store extents below one root, each used a second after the one before."""
    DiskStore.open(directory, "model", LIMITS).close()
    [folder] = directory.glob("v2-*")
    began = time.time() - n_extents
    for number in range(n_extents):
        _, header = encode(ROOT, ROOT, [Entry(named(number), 32, PARTS)])
        path = folder / f"{number:016x}.kv"
        path.write_bytes(b"".join((header, *PARTS)))
        os.utime(path, (began + number,) * 2)


def steps(seconds: float, beside: Callable[[], None] | None, every_seconds: float) -> list[float]:
    """The milliseconds of steps, while `beside` is called again and again."""
    matrix = np.ones((SIDE, SIDE), np.float32)
    found, end, due = list[float](), time.perf_counter() + seconds, 0.0
    while (began := time.perf_counter()) < end:
        if beside is not None and began > due:
            beside()
            began = time.perf_counter()
            due = began + every_seconds
        for _ in range(STEP_CALLS):
            np.dot(matrix, matrix)
            sum(range(BETWEEN))
        found.append(1e3 * (time.perf_counter() - began))
    return found


def measure(n_extents: int, rounds: int, seconds: float) -> Figures:
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

        loads = {
            "alone": (None, 0.0),
            "writes": (write, WRITE_EVERY_SECONDS),
            "upkeep": (disk.upkeep, UPKEEP_EVERY_SECONDS),
        }
        steps(seconds, None, 0.0)
        found = {load: list[float]() for load in loads}
        for _ in range(rounds):
            for load, (beside, every_seconds) in loads.items():
                found[load] += steps(seconds, beside, every_seconds)
        disk.close()
    return Figures(
        n_extents,
        open_seconds,
        {load: _percentiles(its) for load, its in found.items()},
    )


def _percentiles(milliseconds: list[float]) -> tuple[float, float]:
    return float(np.percentile(milliseconds, 50)), float(np.percentile(milliseconds, 99))


def table(all_figures: list[Figures]) -> Table:
    loads = all_figures[0].step_milliseconds
    columns = ("extents", "open s", *(f"{load}: p50, p99 ms" for load in loads))
    rows = (
        (
            f"{figures.extents:,}",
            f"{figures.open_seconds:.2f}",
            *("{:.2f}, {:.2f}".format(*its) for its in figures.step_milliseconds.values()),
        )
        for figures in all_figures
    )
    return Table(columns, tuple(rows))


def main(
    rounds: int = 5,
    seconds: float = 2.0,
    extents: list[int] | None = None,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure the disk cache with several numbers of extents."""
    all_figures = [measure(n_extents, rounds, seconds) for n_extents in extents or EXTENTS]
    show_figures(table(all_figures), all_figures, json_path)


if __name__ == "__main__":
    typer.run(main)
