"""Host time of a decode step without MLX, in microseconds.

    python -m load_tests.bench.host [--against DIRECTORY] [--rounds N] [--json PATH]

The engine's own loop runs on this thread over a runner that answers at once; the time that the
runner takes is not counted. Rows decode random words with a byte-level tokenizer, speculative
decoding is on and finds nothing to draft. Cases: 1 and 32 rows, plain and with a disk cache.

With `--against` the same module of another checkout runs in turn, each round in a new process:
compare two commits by the ratio of their medians.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from load_tests.bench.host_engine import HostEngine
from load_tests.report import Table
from load_tests.terminal import show_figures

ROWS = (1, 32)
WARM_UP_STEPS = 200
STEPS = 1000

Figures = dict[str, float]
"""Median microseconds of a step, by case."""


def measure() -> Figures:
    """Every case once, in a random order."""
    cases = [(rows, has_disk) for rows in ROWS for has_disk in (False, True)]
    random.shuffle(cases)
    return {_name(rows, has_disk): _step_microseconds(rows, has_disk) for rows, has_disk in cases}


def _name(rows: int, has_disk: bool) -> str:
    return f"{rows} rows, {'disk cache' if has_disk else 'plain'}"


def _step_microseconds(rows: int, has_disk: bool) -> float:
    with tempfile.TemporaryDirectory() as directory:
        engine = HostEngine(rows, Path(directory) if has_disk else None)
        for _ in range(WARM_UP_STEPS):
            engine.turn()
        times = list[float]()
        for _ in range(STEPS):
            engine.runner_seconds, began = 0.0, time.perf_counter()
            engine.turn()
            times.append(time.perf_counter() - began - engine.runner_seconds)
        engine.close()
    return 1e6 * statistics.median(times)


def _measure_elsewhere(directory: Path) -> Figures:
    """One round of the checkout in `directory`, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "load_tests.bench.host", "--once"],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(directory)},
        check=True,
        capture_output=True,
    )
    figures: Figures = json.loads(done.stdout)
    return figures


def main(
    against: Annotated[Path | None, typer.Option(help="Another checkout, to compare with.")] = None,
    rounds: int = 5,
    once: Annotated[bool, typer.Option("--once", hidden=True)] = False,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure the host time of a step; with --against, the ratio to another checkout's."""
    if once:
        print(json.dumps(measure()))
        return
    sides = [Path.cwd(), *([against.resolve()] if against else [])]
    taken: list[list[Figures]] = [[] for _ in sides]
    for _ in range(rounds):
        for index, side in enumerate(sides):
            taken[index].append(_measure_elsewhere(side))
    medians = [
        {case: statistics.median(figures[case] for figures in each) for case in each[0]}
        for each in taken
    ]
    columns = ("case", "us a step", *(("us against", "ratio") if against else ()))
    rows = []
    for case in sorted(medians[0]):
        cells = [f"{each[case]:.0f}" for each in medians]
        ratio = [f"{medians[0][case] / medians[1][case]:.2f}"] if against else []
        rows.append((case, *cells, *ratio))
    show_figures(Table(columns, tuple(rows)), medians, json_path)


if __name__ == "__main__":
    typer.run(main)
