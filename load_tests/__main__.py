"""`python -m load_tests`: load a server, compare some, put a router before two, play an agent,
hold many streams.
"""

import asyncio
import dataclasses
import logging
from pathlib import Path
from typing import Annotated

import typer
from pydantic import TypeAdapter

from engine.mlx_backend.host.blas import load_blas
from load_tests.agents.command import agents
from load_tests.checkpoint import Shape, checkpoint
from load_tests.client import TargetError, discover, play
from load_tests.compare import Bench, Comparison
from load_tests.compare import compare as compare_peers
from load_tests.conditions import Conditions, observe
from load_tests.peers import STOCK_LISTEN_QUEUE, mlx_lm, rootstock
from load_tests.replicas.command import router
from load_tests.report import Summary, comparison_table, run_table, summarize
from load_tests.streams.command import streams
from load_tests.terminal import fail, show
from load_tests.workloads import build, load_scenario, scenario_names

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command()(router)
app.command()(agents)
app.command()(streams)

Scenarios = Annotated[
    list[str] | None, typer.Option("--scenario", help="A name; may be repeated. All by default.")
]
Seed = Annotated[int, typer.Option(help="Of the texts.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Where to write all figures.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print Markdown, for a README.")]


@dataclasses.dataclass(frozen=True, slots=True)
class Runs:
    """The JSON of `run`."""

    conditions: Conditions
    scenarios: dict[str, Summary]


@dataclasses.dataclass(frozen=True, slots=True)
class Comparisons:
    """The JSON of `compare`."""

    conditions: Conditions
    scenarios: dict[str, Comparison]


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
        summaries = asyncio.run(_run(target, model, api_key, scenario or scenario_names(), seed))
    except TargetError as error:
        raise typer.Exit(fail(str(error))) from error
    show(conditions, markdown, run_table(summaries.items()))
    if json:
        json.write_bytes(TypeAdapter(Runs).dump_json(Runs(conditions, summaries), indent=2))


async def _run(
    base_url: str, model: str, api_key: str, scenarios: list[str], seed: int
) -> dict[str, Summary]:
    target = await discover(base_url, api_key)
    if model:
        target = dataclasses.replace(target, model=model)
    return {
        name: summarize(await play(build(load_scenario(name), seed), target)) for name in scenarios
    }


@app.command()
def compare(
    *,
    scenario: Scenarios = None,
    shape: Annotated[Shape, typer.Option("--checkpoint", help="What both serve.")] = "qwen3",
    repeat: Annotated[int, typer.Option(min=1, help="Pairs of runs per scenario.")] = 3,
    flag: Annotated[
        list[str] | None,
        typer.Option(help="Compare with Rootstock under these flags, not with mlx_lm.server."),
    ] = None,
    peer_flag: Annotated[
        list[str] | None, typer.Option(help="One more argument for mlx_lm.server.")
    ] = None,
    peer_listen_queue: Annotated[
        int, typer.Option(help="Connections that may wait for mlx_lm.server; see mlx_lm_peer.py.")
    ] = STOCK_LISTEN_QUEUE,
    seed: Seed = 0,
    json: JsonFile = None,
    markdown: Markdown = False,
) -> None:
    """Start Rootstock and a peer in turn and print how many times faster Rootstock is."""
    peer = mlx_lm(*(peer_flag or []), listen_queue=peer_listen_queue)
    ours, theirs = rootstock(), rootstock(*flag) if flag else peer
    model = checkpoint(shape)
    commands = tuple(" ".join(("python", *side.arguments)) for side in (ours, theirs))
    conditions = observe(seed, commands, str(load_blas()) or "the system's")
    bench = Bench(model, logs=model.parent)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("load_tests").setLevel(logging.INFO)
    results: dict[str, Comparison] = {}
    for name in scenario or scenario_names():
        logging.getLogger("load_tests").info("%s:", name)
        workload = build(load_scenario(name), seed)
        results[name] = compare_peers(bench, ours, theirs, workload, repeat)
    whole = [(name, c.ours, c.theirs) for name, c in results.items() if c.ours]
    show(conditions, markdown, comparison_table((ours.name, theirs.name), whole))
    if json:
        found = Comparisons(conditions, results)
        json.write_bytes(TypeAdapter(Comparisons).dump_json(found, indent=2))
    failures = [(name, f) for name, c in results.items() for f in c.failures]
    for name, failure in failures:
        fail(f"{name}: {failure.peer}: {failure.reason}")
    raise typer.Exit(1 if failures else 0)


if __name__ == "__main__":
    app()
