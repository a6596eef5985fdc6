"""The table of `rootstock doctor`."""

from rich.table import Table
from rich.text import Text

from engine.types import MachineReport


def machine_table(report: MachineReport) -> Table:
    """What the machine offers the configured model, a line each."""
    table = Table(show_header=False, box=None, padding=(0, 2))
    for name, value in _rows(report):
        table.add_row(Text(name, style="bold"), Text(value))  # a path is no markup
    return table


def _rows(report: MachineReport) -> list[tuple[str, str]]:
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
    return [(name, value) for name, value in rows if value]


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.2f} GiB"
