"""`rootstock doctor`."""

import os
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from engine.launch import describe_machine
from engine.values.settings import EngineConfig
from engine.values.stats import MachineReport
from measuring.doctor import MeasureConfig
from measuring.doctor import measure as take_measurements
from server.settings import Settings
from server.terminal.commands.on_demand import command_app
from server.terminal.flags import with_settings
from server.terminal.measured import to_json, to_markdown
from server.terminal.tables import facts, show

REPORT = "rootstock-measurements"
"""The name of both files, but for what they end in."""

app = command_app()


def _writable(folder: Path) -> Path:
    """What takes ten minutes is not lost at the end for a folder that is not there."""
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise typer.BadParameter(f"{folder} is no folder that can be written to")
    return folder


@app.command()
@with_settings({"config", *(field.name for field in fields(EngineConfig))})
def doctor(
    settings: Settings,
    *,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Measure for ten minutes at most, and write a report to send with an issue.",
        ),
    ] = False,
    into: Annotated[
        Path, typer.Option(help="The folder of the report.", callback=_writable)
    ] = Path(),
) -> None:
    """Print what the machine offers, and what the KV budget comes to in tokens.

    With --measure: how fast the device attends, decodes and gathers, what memory that takes, and
    whether every architecture passes the check at load. The report has no path, no name of a user,
    a machine or a model, and no text. Ctrl-C ends it early and writes what there is.
    """
    config = settings.config_of(settings.each_model()[0])
    report = describe_machine(config)
    show(machine_table(report))
    if report.problem:
        raise typer.Exit(1)
    if measure:
        _measure(config, into)


def _measure(config: EngineConfig, into: Path) -> None:
    found = take_measurements(MeasureConfig(config), typer.echo)
    for ending, text in (("md", to_markdown(found)), ("json", to_json(found))):
        path = into / f"{REPORT}.{ending}"
        path.write_text(text, encoding="utf-8")
        typer.echo(f"wrote {path}")


def machine_table(report: MachineReport) -> Table:
    """What the machine offers the configured model, a line each."""
    rows = [
        ("device", report.device),
        ("memory", f"{_gib(report.memory_bytes)}, {_gib(report.left_bytes)} not in use"),
        ("BLAS", report.blas),
        ("advice", report.advice),
        ("MLX", f"{report.mlx_version}, mlx-lm {report.mlx_lm_version}"),
        ("model", report.model),
    ]
    if report.problem:
        rows.append(("problem", report.problem))
    else:
        tokens = f"{report.arena_tokens:,} tokens"
        rows.append(("weights", _gib(report.weight_bytes)))
        rows.append(("KV cache", f"{_gib(report.arena_bytes)}, which holds {tokens}"))
    return facts(rows)


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.2f} GiB"
