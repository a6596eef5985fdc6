"""What attention costs in a decode and in a prompt chunk, by strategy. No model.

    python -m load_tests.bench.attention [--dtype bfloat16]

Some layers of 16 heads over 8 KV heads of 128, blocks of 32 tokens in tables shuffled over the
arena. A decode is one token of each row, as `gather` and `cascade` attend to it, a chunk is some
tokens of one row: both beside MLX's own attention over keys that lie side by side, padded to the
longest row. On a CPU `cascade` takes float32 alone. The kinds alternate, so that what else the
machine does is the same for all; times are the least, ratios the medians of those of each round.
"""

# ruff: noqa: E402 - MLX comes after the BLAS

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import typer
from rich.console import Console

from engine.mlx_backend.cpu.blas import load_blas

load_blas()

import mlx.core as mx

from engine.mlx_backend.attention.dispatch import scaled_dot_product_attention
from engine.mlx_backend.attention.strategy import Attention, GatherAttention
from engine.mlx_backend.cpu.cascade import CascadeAttention
from engine.mlx_backend.model.forward import Forward, TokenSpan
from engine.mlx_backend.storage.arena import Arena, LayerShape
from load_tests.report import Table

HEADS, KV_HEADS, DIM, BLOCK_SIZE = 16, 8, 128, 32
SCALE = DIM**-0.5
N_LAYERS = 2
"""Enough that no layer finds its blocks in the processor's cache."""

Step: TypeAlias = Callable[[], mx.array]


@dataclass(frozen=True, slots=True)
class Decode:
    """Rows of so many tokens, the first `shared` of them the same."""

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


def spans_of(decode: Decode, n_blocks: int) -> list[TokenSpan]:
    """The last token of each row, over tables of shuffled blocks; sorted by table."""
    free = iter(np.random.default_rng(0).permutation(n_blocks).tolist())
    prefix = [next(free) for _ in range(decode.shared // BLOCK_SIZE)]
    tables = [
        prefix + [next(free) for _ in range(-(-n // BLOCK_SIZE) - len(prefix))]
        for n in decode.contexts
    ]
    rows = sorted(zip(tables, decode.contexts, strict=True))
    return [TokenSpan(n - 1, 1, np.array(blocks, dtype=np.uint32)) for blocks, n in rows]


def filled_arena(n_blocks: int, dtype: mx.Dtype) -> Arena:
    shape = LayerShape(KV_HEADS, DIM, DIM, dtype, dtype)
    arena = Arena([shape] * N_LAYERS, n_blocks, BLOCK_SIZE)
    for layer in arena.layers:
        ids = mx.arange(n_blocks)
        layer.put_blocks(0, *(random(dtype, *array.shape) for array in layer.blocks(ids)))
        mx.eval(layer.arrays())
    return arena


def random(dtype: mx.Dtype, *shape: int) -> mx.array:
    array = mx.random.normal(shape).astype(dtype)
    mx.eval(array)
    return array


def stepper(
    arena: Arena, spans: Sequence[TokenSpan], attention: Attention, dtype: mx.Dtype
) -> Step:
    """One forward's attention: each layer's queries follow from the layer before."""
    rows, length = len(spans), spans[0].n_tokens
    queries = random(dtype, rows, HEADS, length, DIM)
    new = random(dtype, rows, KV_HEADS, length, DIM)

    def step() -> mx.array:
        forward = Forward(spans, arena)
        output = queries
        for view in attention.views(arena, forward):
            keys, values = view.update_and_fetch(new, new)
            mask = view.make_mask(length)
            output = scaled_dot_product_attention(output, keys, values, view, SCALE, mask)
        return output

    return step


def contiguous_stepper(contexts: Sequence[int], length: int, dtype: mx.Dtype) -> Step:
    """MLX's own attention over keys that nobody had to gather, behind so many tokens of each row.

    What a row lacks of the longest is masked, as mlx-lm does with rows of unequal length.
    """
    rows, longest = len(contexts), max(contexts)
    queries = random(dtype, rows, HEADS, length, DIM)
    layers = [[random(dtype, rows, KV_HEADS, longest, DIM) for _ in "kv"] for _ in range(N_LAYERS)]
    mask: mx.array | str = "causal"
    if min(contexts) < longest:
        mask = mx.arange(longest) < mx.array(list(contexts))[:, None, None, None]

    def step() -> mx.array:
        output = queries
        for keys, values in layers:
            output = mx.fast.scaled_dot_product_attention(
                output, keys, values, scale=SCALE, mask=mask
            )
        return output

    return step


def alternate(steps: Mapping[str, Step], rounds: int) -> dict[str, list[float]]:
    """Milliseconds a layer of each kind in each round, after one that is not counted."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for done in range(-1, rounds):
        for name, step in steps.items():
            started = time.perf_counter()
            mx.eval(step())
            if done >= 0:
                times[name].append(1e3 * (time.perf_counter() - started) / N_LAYERS)
    return times


def line(name: str, times: Mapping[str, Sequence[float]]) -> tuple[str, ...]:
    """The first kind's milliseconds, and how many times as long each other takes."""
    base = next(iter(times.values()))
    ratios = {
        kind: statistics.median(b / a for a, b in zip(base, other, strict=True))
        for kind, other in times.items()
    }
    found = (f"{ratios[kind]:.2f}" if kind in ratios else "" for kind in ("gather", "cascade"))
    return name, f"{min(base):.2f}", *found


def decode_line(decode: Decode, dtype: mx.Dtype, rounds: int) -> tuple[str, ...]:
    n_blocks = sum(-(-n // BLOCK_SIZE) for n in decode.contexts)
    arena, spans = filled_arena(n_blocks, dtype), spans_of(decode, n_blocks)
    ours = {one.name: stepper(arena, spans, one, dtype) for one in strategies(dtype)}
    steps = {"contiguous": contiguous_stepper(decode.contexts, 1, dtype), **ours}
    return line(decode.name, alternate(steps, rounds))


def chunk_line(start: int, length: int, dtype: mx.Dtype, rounds: int) -> tuple[str, ...]:
    n_blocks = -(-(start + length) // BLOCK_SIZE)
    spans = [TokenSpan(start, length, np.arange(n_blocks, dtype=np.uint32)[::-1])]
    arena = filled_arena(n_blocks, dtype)
    ours = {one.name: stepper(arena, spans, one, dtype) for one in strategies(dtype)}
    steps = {"contiguous": contiguous_stepper([start + length], length, dtype), **ours}
    return line(f"{length} behind {start:,}", alternate(steps, rounds))


def strategies(dtype: mx.Dtype) -> list[Attention]:
    """Those that take the dtype here."""
    takes_all = dtype == mx.float32 or mx.default_device() != mx.cpu
    return [GatherAttention(), CascadeAttention()] if takes_all else [GatherAttention()]


def main(rounds: int = 9, dtype: Literal["float32", "float16", "bfloat16"] = "float32") -> None:
    """Measure decodes and chunks on the device that MLX takes by default."""
    console = Console(width=100)
    kind = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}[dtype]
    columns = ("MLX's own, ms a layer", "gather, times", "cascade, times")
    decodes = [decode_line(decode, kind, rounds) for decode in DECODES]
    console.print(Table(("decode", *columns), tuple(decodes)).rich())
    chunks = [chunk_line(*chunk, kind, max(1, rounds // 3)) for chunk in CHUNKS]
    console.print(Table(("chunk", *columns), tuple(chunks)).rich())


if __name__ == "__main__":
    typer.run(main)
