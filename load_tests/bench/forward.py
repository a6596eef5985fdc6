"""One step of the engine over mlx-lm's bare forward, in one process: `python -m
load_tests.bench.forward [--shape thin] [--rows 8] [--context 4096] [--json PATH]`.

That many rows decode at once, on one of the load tests' checkpoints, after unique prompts: nothing
is shared. Their prompts have that many tokens, or up to a block less, so that rows begin their
blocks at unlike steps. The engine is the daemon's own but for its thread, and is turned by hand;
the bare model decodes as many rows, all of the mean length, over mlx-lm's own KV caches, argmax and
evaluation included. Both take turns of some steps each, and their contexts grow alike. The ratio is
the median of the rounds' own ratios. `compiled` is the share of the engine's steps that were.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from engine.mlx_backend.blas import load_blas
from engine.values.settings import EngineConfig
from load_tests.checkpoint import checkpoint
from load_tests.conditions import observe
from load_tests.report import Table
from load_tests.shapes import Shape
from measuring.engine_step import EngineHarness, StepTimes, generated_tokens, step_times

ROWS = (1, 8, 16, 32)
CONTEXTS = (256,)


@dataclass(frozen=True, slots=True)
class Found:
    """The times of one number of rows after one context."""

    rows: int
    context_tokens: int
    times: StepTimes


def table(all_found: list[Found]) -> Table:
    """A row for each number of rows."""
    columns = (
        *("rows", "context", "engine ms", "bare ms", "engine / bare", "least", "greatest"),
        "compiled",
    )
    rows = (
        (
            str(found.rows),
            f"{found.context_tokens:,}",
            f"{found.times.engine_ms:.2f}",
            f"{found.times.bare_ms:.2f}",
            f"{found.times.engine_times:.3f}",
            f"{found.times.least_times:.2f}",
            f"{found.times.greatest_times:.2f}",
            f"{found.times.compiled_share:.0%}",
        )
        for found in all_found
    )
    return Table(columns, tuple(rows))


def main(
    rounds: int = 24,
    shape: Annotated[Shape, typer.Option(help="Of the checkpoint; see shapes.py.")] = "qwen3",
    rows: Annotated[list[int] | None, typer.Option(min=1, help="1, 8, 16 and 32")] = None,
    context: Annotated[list[int] | None, typer.Option(min=2, help="Of a prompt: 256")] = None,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure each number of rows after each context."""
    conditions = observe(0, (), load_blas().name or "the system's")
    rows, context = rows or list(ROWS), context or list(CONTEXTS)
    config = EngineConfig(str(checkpoint(shape)))
    max_tokens = generated_tokens(rounds, max(rows), max(context), config.step_tokens)
    engine = EngineHarness(config, max(rows), max(context) + max_tokens)
    all_found = [
        Found(n, tokens, step_times(engine, n, tokens, rounds, max_tokens))
        for tokens in context
        for n in rows
    ]
    console = Console(width=100)
    console.print(table(all_found).rich())
    decode = engine.decode()
    console.print(f"decode {decode.why}")
    for line in conditions.lines():
        console.print(line, highlight=False)
    if json_path is not None:
        saved = {
            "conditions": asdict(conditions),
            "decode": asdict(decode),
            "rows": [asdict(found) for found in all_found],
        }
        json_path.write_text(json.dumps(saved, indent=2))


if __name__ == "__main__":
    typer.run(main)
