"""A long run: `python -m tests.simulation --steps 1000000 --seed 0`."""

import logging
from itertools import count
from typing import Annotated

import typer
from rich.progress import Progress

from tests.simulation.census import Census
from tests.simulation.simulator import run

STEPS_EACH = 500


def main(
    steps: Annotated[int, typer.Option(help="How many turns of the loop in all.")] = 1_000_000,
    seed: Annotated[int, typer.Option(help="Seed of the first simulation.")] = 0,
) -> None:
    """Simulate machines of STEPS_EACH steps, each with the next seed, recount everything after each
    turn of the loop, and say how often what happened.
    """
    logging.disable(logging.CRITICAL)  # the faults are injected
    done, census = 0, Census()
    with Progress() as progress:
        task = progress.add_task("simulating", total=steps)
        for last in count(seed):
            turns, happened = run(last, STEPS_EACH)
            done += turns
            census += happened
            progress.update(task, completed=done)
            if done >= steps:
                break
    for happening, times in sorted(census.items()):
        print(f"{times:>9,} {happening}")
    print(f"{done:,} turns in {last - seed + 1:,} simulations, seeds {seed} to {last}: all held")


if __name__ == "__main__":
    typer.run(main)
