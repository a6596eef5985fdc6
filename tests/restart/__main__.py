"""`python -m tests.restart kills | faults | families`: long runs, the seed printed."""

from typing import Annotated

import typer

from tests.restart import families as kinds
from tests.restart import faults as staging
from tests.restart import kills as killing
from tests.restart.faults import SCENES
from tests.restart.questions import Load

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

FAMILIES = ("qwen3", "gemma3_text", "qwen3_next")
Seed = Annotated[int, typer.Option(help="Of prompts, moments and damages.")]
Families = Annotated[
    list[str] | None, typer.Option("--family", help="Of model; may be repeated. Several kinds.")
]

Scenes = Annotated[list[str] | None, typer.Option("--scene", help="May be repeated. All.")]


@app.command()
def kills(
    *,
    count: Annotated[int, typer.Option("--kills", min=1, help="In all.")] = 100,
    family: Families = None,
    seed: Seed = 1,
) -> None:
    """Kill daemons under load, and ask the next on the same directory."""
    chosen = family or FAMILIES
    shares = [(count + place) // len(chosen) for place in range(len(chosen))]
    answers = sum(
        killing.run(name, share, seed, Load()) for name, share in zip(chosen, shares, strict=True)
    )
    print(f"{count} kills, {answers} answers, all of them right")


@app.command()
def faults(*, family: Families = None, scene: Scenes = None, seed: Seed = 1) -> None:
    """Let everything happen to a directory that can."""
    chosen = [each for each in SCENES if not scene or each.name in scene]
    for name in family or ("qwen3",):
        staging.run(name, seed, Load(), chosen)


@app.command()
def families(*, family: Families = None, seed: Seed = 1) -> None:
    """Stop and kill a daemon of each kind of model, and ask the next one again."""
    for name in family or kinds.FAMILIES:
        kinds.run(name, seed)


if __name__ == "__main__":
    app()
