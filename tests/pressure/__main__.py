"""`python -m tests.pressure --runs 50`: a daemon among growing processes, in a control group."""

from collections import Counter
from typing import Annotated

import typer

from tests.pressure.groups import NoGroups
from tests.pressure.runs import crowded, run

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def pressure(
    *,
    runs: Annotated[int, typer.Option(min=1)] = 50,
    seed: Annotated[int, typer.Option(help="Of prompts.")] = 1,
) -> None:
    """Let a process grow next to one daemon, again and again. Nothing may be ended by the kernel,
    every request must have an end, and all must be as before afterwards.
    """
    ends = Counter[str]()
    try:
        with crowded(seed) as (group, daemon, limit):
            for index in range(runs):
                ends += run(group, daemon, limit, seed + index)
                print(f"run {index + 1}: {dict(ends)}", flush=True)
    except NoGroups as error:
        raise typer.BadParameter(f"{error}") from error
    print(f"{runs} runs: no process was ended; requests: {dict(ends)}")


app()
