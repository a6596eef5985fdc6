"""The option of commands that play scenarios."""

from typing import Annotated

import typer

from load_tests.scenarios.kinds import scenario_names


def _known(names: list[str] | None) -> list[str] | None:
    """Raises typer.BadParameter."""
    there = scenario_names()
    for name in names or ():
        if name not in there:
            raise typer.BadParameter(f"{name} is none of {', '.join(there)}.")
    return names


Scenarios = Annotated[
    list[str] | None,
    typer.Option(
        "--scenario",
        help="A name; may be repeated. By default all that do not begin with real-.",
        callback=_known,
    ),
]
