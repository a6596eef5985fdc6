"""`python -m load_tests`: load a server, compare some, hold thousands of connections, fill
Grafana's panels.
"""

import asyncio
import dataclasses
from pathlib import Path
from typing import Annotated

import typer
from pydantic import TypeAdapter

from load_tests.client import TargetError, discover
from load_tests.conditions import Conditions, observe
from load_tests.fleet import fleet
from load_tests.grafana.command import grafana
from load_tests.scenarios.kinds import Playable, Restarting, load_scenario, text_scenario_names
from load_tests.scenarios.load import Summary, run_table
from load_tests.scenarios.option import Scenarios
from load_tests.scenarios.perform import Outcome, perform
from load_tests.side_by_side.command import compare, results
from load_tests.streams.crowd import crowd
from load_tests.terminal import fail, show

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command()(compare)
app.command()(results)
app.command()(crowd)
app.command()(grafana)
app.command()(fleet)

Seed = Annotated[int, typer.Option(help="Of the texts.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Where to write all figures.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print Markdown, for a README.")]


@dataclasses.dataclass(frozen=True, slots=True)
class Runs:
    """The JSON of `run`."""

    conditions: Conditions
    scenarios: dict[str, Outcome]


@app.command()
def run(
    *,
    target: Annotated[str, typer.Option(help="Base URL, such as http://127.0.0.1:8000/v1.")],
    model: Annotated[str, typer.Option(help="The first one listed, by default.")] = "",
    api_key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY")] = "",
    scenario: Scenarios = None,
    seed: Seed = 0,
    json: JsonFile = None,
    markdown: Markdown = False,
) -> None:
    """Play scenarios against a running server."""
    conditions = observe(seed, (target,), blas="the server's")
    try:
        outcomes = asyncio.run(
            _run(target, model, api_key, scenario or text_scenario_names(), seed)
        )
    except TargetError as error:
        raise typer.Exit(fail(str(error))) from error
    loads = [(name, found) for name, found in outcomes.items() if isinstance(found, Summary)]
    show(conditions, markdown, *([run_table(loads)] if loads else []))
    for name, found in outcomes.items():
        if not isinstance(found, Summary):
            print(f"{name}: {found.headline}")
    if json:
        json.write_bytes(TypeAdapter(Runs).dump_json(Runs(conditions, outcomes), indent=2))


async def _run(
    base_url: str, model: str, api_key: str, scenarios: list[str], seed: int
) -> dict[str, Outcome]:
    target = await discover(base_url, api_key)
    if model:
        target = dataclasses.replace(target, model=model)
    return {name: await perform(_playable(name), seed, target) for name in scenarios}


def _playable(name: str) -> Playable:
    scenario = load_scenario(name)
    if isinstance(scenario, Restarting):
        raise TargetError(f"{name} starts servers of its own: `compare` plays it")
    return scenario


if __name__ == "__main__":
    app()
