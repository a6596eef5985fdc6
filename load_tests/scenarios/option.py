"""The option of commands that play scenarios."""

from fnmatch import fnmatchcase
from typing import Annotated

import typer

from load_tests.scenarios.kinds import scenario_names


def _known(patterns: list[str] | None) -> list[str] | None:
    """The scenarios that match one of the patterns. Raises typer.BadParameter."""
    there = scenario_names()
    if patterns is None:
        return None
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in there):
            raise typer.BadParameter(f"{pattern} is none of {', '.join(there)}.")
    return [name for name in there if any(fnmatchcase(name, pattern) for pattern in patterns)]


Scenarios = Annotated[
    list[str] | None,
    typer.Option(
        "--scenario",
        help="A name, or a pattern such as 'unique-*'; may be repeated. By default 'text-*'.",
        callback=_known,
    ),
]
