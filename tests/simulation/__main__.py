"""A long run: `python -m tests.simulation --steps 1000000 --seed 0`."""

import logging
from typing import Annotated

import typer
from rich.progress import track

from tests.simulation.simulator import run

STEPS_EACH = 500


def main(
    steps: Annotated[int, typer.Option(help="How many steps of the loop in all.")] = 1_000_000,
    seed: Annotated[int, typer.Option(help="Seed of the first simulation.")] = 0,
) -> None:
    """Simulate daemons of STEPS_EACH steps, each with the next seed, and recount at every step."""
    logging.disable(logging.CRITICAL)  # the faults are injected
    done = 0
    for number in track(range(steps // STEPS_EACH), description="simulating"):
        done += run(seed + number, STEPS_EACH)
    print(f"{done} steps in {steps // STEPS_EACH} simulations, seeds from {seed}: all held")


if __name__ == "__main__":
    typer.run(main)
