"""Processor time of the server's process for each token that it streams, in microseconds.

    python -m load_tests.bench.server_cpu [--against DIRECTORY] [--rounds N] [--json PATH]

The engine is a process of its own that computes nothing: it gives every stream a token at a fixed
rate (`load_tests.streams.paced`). Only the server's process is counted, all its threads. Cases: 1,
32 and 256 streams of chat completions.

With `--against` the server of another checkout runs in turn, each round in a new process: compare
two commits by the ratio of their medians.
"""

import statistics
from pathlib import Path
from typing import Annotated

import typer

from load_tests.client import TargetError
from load_tests.report import Table
from load_tests.streams.command import measure
from load_tests.terminal import fail, show_figures

TOKENS_PER_SECOND = {1: 50.0, 32: 20.0, 256: 4.0}
"""Of each stream, by the number of streams: low enough that no two tokens of a stream come at once,
which would make each cheaper, also on two cores that others use.
"""

HERE = Path(__file__).parents[2]


def main(
    against: Annotated[Path | None, typer.Option(help="Another checkout, to compare with.")] = None,
    rounds: int = 3,
    seconds: Annotated[float, typer.Option(help="How long each case is measured.")] = 10.0,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure and print a table."""
    checkouts = {"here": HERE} | ({"there": against.resolve()} if against else {})
    found: dict[str, dict[int, list[float]]] = {
        name: {count: [] for count in TOKENS_PER_SECOND} for name in checkouts
    }
    for number in range(rounds):
        for count, rate in TOKENS_PER_SECOND.items():
            for name in sorted(checkouts, reverse=bool(number % 2)):
                try:
                    run = measure(count, rate, seconds, checkouts[name])
                except TargetError as error:
                    raise typer.Exit(fail(str(error))) from error
                found[name][count].append(run.cpu_microseconds_per_token)
    rows = tuple(
        (str(count), *(_figures(found[name][count]) for name in checkouts), _ratio(found, count))
        for count in TOKENS_PER_SECOND
    )
    columns = ("streams", *(f"us a token {name}" for name in checkouts), "ratio of medians")
    show_figures(Table(columns, rows), [found], json_path)


def _figures(runs: list[float]) -> str:
    return f"{statistics.median(runs):.0f} ({min(runs):.0f} to {max(runs):.0f})"


def _ratio(found: dict[str, dict[int, list[float]]], count: int) -> str:
    if "there" not in found:
        return ""
    here, there = (statistics.median(found[name][count]) for name in ("here", "there"))
    return f"{here / there:.2f}"


if __name__ == "__main__":
    typer.run(main)
