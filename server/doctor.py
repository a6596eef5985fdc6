"""The table of `rootstock doctor`."""

from rich.table import Table

from engine.types import MachineReport


def machine_table(report: MachineReport) -> Table:
    """What the machine offers the configured model, a line each."""
    table = Table(show_header=False, box=None, padding=(0, 2))
    for name, value in _rows(report):
        table.add_row(f"[bold]{name}[/bold]", value)
    return table


def _rows(report: MachineReport) -> list[tuple[str, str]]:
    rows = [
        ("device", report.device),
        ("memory", f"{_gib(report.memory_bytes)}, {_gib(report.left_bytes)} not in use"),
        ("BLAS", report.blas),
        ("advice", report.advice),
        ("MLX", f"{report.mlx_version}, mlx-lm {report.mlx_lm_version}"),
        ("model", report.model),
        ("KV cache", f"{_gib(report.arena_bytes)}, which holds {report.arena_tokens:,} tokens"),
        ("problem", report.problem),
    ]
    return [(name, value) for name, value in rows if value]


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.2f} GiB"
