"""`rootstock doctor`."""

from dataclasses import fields

import typer
from rich.table import Table

from engine.launch import describe_machine
from engine.types.settings import EngineConfig
from engine.types.statistics import MachineReport
from server.settings import Settings
from server.terminal.commands.on_demand import command_app
from server.terminal.flags import with_settings
from server.terminal.tables import facts, show

app = command_app()


@app.command()
@with_settings({"config", *(field.name for field in fields(EngineConfig))})
def doctor(settings: Settings) -> None:
    """Print what the machine offers, and what the KV budget comes to in tokens."""
    report = describe_machine(settings.engine_config())
    show(machine_table(report))
    if report.problem:
        raise typer.Exit(1)


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
