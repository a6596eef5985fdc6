"""The time of attention in a decode and in a prompt chunk, by strategy. No model.

    python -m load_tests.bench.attention [--dtype bfloat16]

It measures the layers of `measuring.device`, with tables shuffled over the arena. A decode is one
token of each row, a chunk is several tokens of one row. The strategies `gather` and `cascade` are
compared with MLX's own attention over contiguous keys, padded to the longest row. On a CPU
`cascade` supports only float32. The kinds take turns, so that other load on the machine affects all
alike. Times are the shortest, ratios are medians over the ratios of each round.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx
import numpy as np
import typer
from rich.console import Console

from engine.mlx_backend.model.rows import TokenSpan
from kvstore.pool import blocks_for
from load_tests.report import Table
from measuring.device import (
    BLOCK_SIZE,
    alternate,
    contiguous_stepper,
    filled_arena,
    ratio,
    shuffled_spans,
    stepper,
    strategies,
)


@dataclass(frozen=True, slots=True)
class Decode:
    """Rows with these numbers of tokens, the first `shared` of which are the same in all rows."""

    name: str
    contexts: Sequence[int]
    shared: int = 0


DECODES = (
    *(Decode(f"{n} x {context:,}", [context] * n) for context in (1024, 4096) for n in (1, 4, 8)),
    Decode("32 x 1,024", [1024] * 32),
    Decode("32 of 100 to 1,867", range(100, 1900, 57)),
    Decode("15 x 300 + 1 x 30,000", [*[300] * 15, 30_000]),
    Decode("16 x 1,190, sharing 1,160", [1190] * 16, 1160),
    Decode("1 x 16,384", [16_384]),
    Decode("4 x 16,384", [16_384] * 4),
    Decode("1 x 32,768", [32_768]),
)
CHUNKS = ((0, 512), (4_096, 512), (12_288, 512), (30_000, 128))
"""Tokens before the chunk, tokens in it."""


def line(name: str, times: Mapping[str, Sequence[float]]) -> tuple[str, ...]:
    """The first kind's milliseconds, and the ratio of each strategy's time to that."""
    base = next(iter(times.values()))
    ratios = {kind: ratio(base, other) for kind, other in times.items()}
    found = (f"{ratios[kind]:.2f}" if kind in ratios else "" for kind in ("gather", "cascade"))
    return name, f"{min(base):.2f}", *found


def decode_line(decode: Decode, dtype: mx.Dtype, rounds: int) -> tuple[str, ...]:
    n_blocks = sum(blocks_for(n, BLOCK_SIZE) for n in decode.contexts)
    arena, spans = filled_arena(n_blocks, dtype), shuffled_spans(decode.contexts, decode.shared)
    ours = {one.name: stepper(arena, spans, one, dtype) for one in strategies(dtype)}
    steps = {"contiguous": contiguous_stepper(decode.contexts, 1, dtype), **ours}
    return line(decode.name, alternate(steps, rounds))


def chunk_line(start: int, length: int, dtype: mx.Dtype, rounds: int) -> tuple[str, ...]:
    n_blocks = blocks_for(start + length, BLOCK_SIZE)
    spans = [TokenSpan(start, length, np.arange(n_blocks, dtype=np.uint32)[::-1])]
    arena = filled_arena(n_blocks, dtype)
    ours = {one.name: stepper(arena, spans, one, dtype) for one in strategies(dtype)}
    steps = {"contiguous": contiguous_stepper([start + length], length, dtype), **ours}
    return line(f"{length} after {start:,}", alternate(steps, rounds))


def main(rounds: int = 9, dtype: Literal["float32", "float16", "bfloat16"] = "float32") -> None:
    """Measure decodes and chunks on MLX's default device."""
    console = Console(width=100)
    kind = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}[dtype]
    columns = ("MLX's own, ms a layer", "gather, times", "cascade, times")
    decodes = [decode_line(decode, kind, rounds) for decode in DECODES]
    console.print(Table(("decode", *columns), tuple(decodes)).rich())
    chunks = [chunk_line(*chunk, kind, max(1, rounds // 3)) for chunk in CHUNKS]
    console.print(Table(("chunk", *columns), tuple(chunks)).rich())


if __name__ == "__main__":
    typer.run(main)
