"""One step of the engine over mlx-lm's bare forward, in one process: `python -m
load_tests.bench.forward [--shape thin] [--rows 8] [--context 4096] [--json PATH]`.

So many rows decode at once, on one of the load tests' checkpoints, after unique prompts of so many
tokens: nothing is shared.
The engine is the daemon's own but for its thread, and is turned by hand; the bare model decodes as
many rows over mlx-lm's own KV caches, argmax and evaluation included. Both take turns of some steps
each, and their contexts grow alike. The ratio is the median of the rounds' own ratios.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from engine.measuring.step import StepTimes, step_times
from engine.measuring.turned_engine import MAX_TOKENS, open_engine
from engine.mlx_backend.cpu.blas import load_blas
from engine.values.settings import EngineConfig
from load_tests.checkpoint import checkpoint
from load_tests.conditions import observe
from load_tests.report import Table
from load_tests.shapes import Shape

ROWS = (1, 8, 16, 32)
CONTEXTS = (256,)


def table(all_times: list[StepTimes]) -> Table:
    """A row for each number of rows."""
    columns = ("rows", "context", "engine ms", "bare ms", "engine / bare", "least", "greatest")
    rows = (
        (
            str(times.rows),
            f"{times.context_tokens:,}",
            f"{times.engine_milliseconds:.2f}",
            f"{times.bare_milliseconds:.2f}",
            f"{times.ratio:.3f}",
            f"{times.least_ratio:.2f}",
            f"{times.greatest_ratio:.2f}",
        )
        for times in all_times
    )
    return Table(columns, tuple(rows))


def main(
    rounds: int = 24,
    shape: Annotated[Shape, typer.Option(help="Of the checkpoint; see shapes.py.")] = "qwen3",
    rows: Annotated[list[int] | None, typer.Option(min=1, help="1, 8, 16 and 32")] = None,
    context: Annotated[list[int] | None, typer.Option(min=2, help="Of a prompt: 256")] = None,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure each number of rows behind each context."""
    conditions = observe(0, (), load_blas().name or "the system's")
    rows, context = rows or list(ROWS), context or list(CONTEXTS)
    pair = open_engine(EngineConfig(str(checkpoint(shape))), max(rows), max(context) + MAX_TOKENS)
    all_times = [
        step_times(pair, n, tokens, rounds, MAX_TOKENS) for tokens in context for n in rows
    ]
    console = Console(width=100)
    console.print(table(all_times).rich())
    for line in conditions.lines():
        console.print(line, highlight=False)
    if json_path is not None:
        found = {"conditions": asdict(conditions), "rows": [asdict(one) for one in all_times]}
        json_path.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    typer.run(main)
