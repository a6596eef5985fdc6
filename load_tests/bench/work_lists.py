"""How long the engine thread takes to list the work of the attention `paged` for decode steps.

    python -m load_tests.bench.work_lists [--rows 32] [--tokens 16384] [--rounds 200] [--json PATH]

A list is made when rows come or go, or outgrow their tables: not in each step. It is one for a
layer of 32 query heads over 8 KV heads of 128 in blocks of 32 tokens; all such layers share it.
Times are processor times of whole calls, the arrays for the device included.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import mlx.core as mx
import numpy as np
import typer

from engine.mlx_backend.gpu.paged import PagedAttention, as_it_is
from engine.mlx_backend.kv.arena import Arena
from engine.mlx_backend.kv.shape import LayerShape
from engine.mlx_backend.model.attention import Attention
from load_tests.report import Table
from load_tests.terminal import show_figures

BLOCK_SIZE = 32
HEADS, KV_HEADS, DIM = 32, 8, 128


@dataclass(frozen=True, slots=True)
class Figures:
    """The times of lists for rows of `tokens` tokens, of which they share `shared_tokens`."""

    rows: int
    tokens: int
    shared_tokens: int
    units: int
    median_milliseconds: float
    least_milliseconds: float


def measure(rows: int, tokens: int, shared_tokens: int, rounds: int) -> Figures:
    """List the work of such rows again and again."""
    arena = Arena([LayerShape(KV_HEADS, DIM, DIM, mx.bfloat16, mx.bfloat16)], 1, BLOCK_SIZE)
    arena.layers[0].query_heads = HEADS
    attention = PagedAttention(Attention(), as_it_is)
    width, n_shared = tokens // BLOCK_SIZE, shared_tokens // BLOCK_SIZE
    own = np.arange(rows * width, dtype=np.uint32).reshape(rows, width) + width
    shared = np.broadcast_to(np.arange(n_shared, dtype=np.uint32), (rows, n_shared))
    table = np.concatenate([shared, own[:, n_shared:]], axis=1)
    n_blocks, seconds, n_units = np.full(rows, width, np.int32), list[float](), 0
    for _ in range(rounds):
        started = time.thread_time()
        work = attention.list_work(table, n_blocks, arena, None)
        seconds.append(time.thread_time() - started)
        assert work is not None
        n_units = len(work.arrays[0])
    return Figures(
        rows,
        tokens,
        shared_tokens,
        n_units,
        1000 * median(seconds),
        1000 * min(seconds),
    )


def table(all_figures: list[Figures]) -> Table:
    """A row for each measurement."""
    columns = ("rows", "tokens", "shared", "units", "median ms", "least ms")
    return Table(
        columns,
        tuple(
            (
                str(each.rows),
                f"{each.tokens:,}",
                f"{each.shared_tokens:,}",
                str(each.units),
                f"{each.median_milliseconds:.2f}",
                f"{each.least_milliseconds:.2f}",
            )
            for each in all_figures
        ),
    )


def main(
    rows: int = 32,
    tokens: int = 16_384,
    rounds: int = 200,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure rows that share nothing, half of their tokens, and all but the last block."""
    all_figures = [
        measure(rows, tokens, shared, rounds) for shared in (0, tokens // 2, tokens - BLOCK_SIZE)
    ]
    show_figures(table(all_figures), all_figures, json_path)


if __name__ == "__main__":
    typer.run(main)
