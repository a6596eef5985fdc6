"""Which loads are played on which model, and what the command says of them."""

import asyncio
import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic import TypeAdapter

from load_tests.checkpoint import checkpoint
from load_tests.client import TargetError
from load_tests.conditions import Conditions, observe
from load_tests.drafts.loads import QUICK, SCALES, TASKS, Load, Model, draw
from load_tests.drafts.rounds import Effort, Measured, measure
from load_tests.drafts.successor import successor_checkpoint
from load_tests.drafts.tables import table
from load_tests.models.daemon import served
from load_tests.shapes import token_bytes
from load_tests.terminal import fail, show

Served = Literal["qwen3", "real", "wide"]
KV_TOKENS = 32 * 512  # more than 32 streams of `unique` have
DEMO = "rootstock-demo"


@dataclasses.dataclass(frozen=True, slots=True)
class Measurement:
    """The JSON."""

    conditions: Conditions
    shape: Served
    loads: tuple[Measured, ...]


def _known(names: list[str] | None) -> list[str]:
    """Raises typer.BadParameter."""
    for name in names or ():
        if name not in TASKS:
            raise typer.BadParameter(f"{name} is none of {', '.join(TASKS)}.")
    return names or list(TASKS)


def drafts(
    *,
    shape: Annotated[Served, typer.Option(help="Of the random model and the successor.")] = "qwen3",
    tasks: Annotated[
        list[str] | None,
        typer.Option("--task", callback=_known, help="May be repeated. By default all."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Behind one that is not measured.")] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="Only whether it runs.")] = False,
    seed: Annotated[int, typer.Option(help="Of the texts.")] = 0,
    json: Annotated[Path | None, typer.Option("--json", help="Where to write it all.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
) -> None:
    """Measure loads with drafts and without. Fails if an answer is not the same."""
    conditions = observe(seed, ("rootstock serve",), blas="the daemon's")
    scale, effort = SCALES[shape], Effort(rounds, warm_ups=1)
    if quick:
        scale, effort = QUICK, Effort(1, warm_ups=0)
    try:
        found = _measure(shape, draw(tasks or (), scale, seed), effort)
    except TargetError as error:
        raise typer.Exit(fail(str(error))) from error
    show(conditions, markdown, table(found))
    if json:
        whole = Measurement(conditions, shape, tuple(found))
        json.write_bytes(TypeAdapter(Measurement).dump_json(whole, indent=2))
    if lines := [f"{each.title}: {line}" for each in found for line in each.differences]:
        raise typer.Exit(fail("\n".join(["Drafts have changed answers:", *lines])))


def _measure(shape: Served, loads: Sequence[Load], effort: Effort) -> list[Measured]:
    """All loads of a model on one daemon, then those of the next."""
    found = dict[int, Measured]()
    for model in sorted({load.model for load in loads}):
        entry = {**_entry(model, shape), "served_model_name": [model]}
        with tempfile.TemporaryDirectory() as folder, served([entry], Path(folder)) as daemon:
            for i, load in enumerate(loads):
                if load.model == model:
                    found[i] = asyncio.run(measure(daemon.url, load, effort))
                    typer.echo(found[i].headline, err=True)
    return [found[i] for i in range(len(loads))]


def _entry(model: Model, shape: Served) -> dict[str, Any]:
    """Of a daemon's `models`."""
    if model == "demo":
        return {"model": DEMO}
    directory = checkpoint(shape) if model == "random" else successor_checkpoint(shape)
    size = KV_TOKENS * token_bytes(shape)
    return {"model": str(directory), "kv_cache_bytes": size, "tool_parser": "hermes"}
