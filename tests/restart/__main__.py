"""`python -m tests.restart kills | faults | families | deaths | budget`: long runs."""

from typing import Annotated

import typer

from tests.restart import families as kinds
from tests.restart import faults as staging
from tests.restart import kills as killing
from tests.restart import several_models
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
    for name in family or kinds.NAMES:
        kinds.run(name, seed)


@app.command()
def deaths(
    times: int = 50, stops: Annotated[int, typer.Option(help="Of these, SIGSTOP.")] = 5
) -> None:
    """Kill one of two models' processes while both stream, again and again."""
    problems = several_models.deaths(times, stops)
    for problem in problems:
        print(problem)
    print(f"{times} deaths, {stops} of them by SIGSTOP, {len(problems)} problems")
    raise typer.Exit(bool(problems))


@app.command()
def budget(
    requests: Annotated[int, typer.Option(help="All together.")] = 200,
    at_once: int = 8,
    budget_mib: Annotated[int, typer.Option(help="For two of the three.")] = 1700,
    seed: int = 0,
) -> None:
    """Ask three models of which two fit into the memory budget, in random order."""
    found = several_models.budget(requests, at_once, budget_mib << 20, seed)
    for failure in found.failures[:5]:
        print(failure)
    most_mib = found.most_bytes >> 20
    print(f"{len(found.failures)} of {requests} requests failed; {found.loads} processes")
    print(f"they had at most {most_mib:,} MiB together, of a budget of {budget_mib:,}")
    raise typer.Exit(bool(found.failures) or most_mib > budget_mib)


if __name__ == "__main__":
    app()
