"""What attention costs in a decode and in a prompt chunk, by strategy. No model.

    python -m load_tests.bench.attention

Some layers of 8 heads over 4 KV heads of 64, blocks of 32 tokens in tables shuffled over the arena,
float32. A decode is one token of each row, as `gather` and `cascade` attend to it; a chunk is some
tokens of one row, beside MLX's own attention over keys that lie side by side. The kinds
alternate, so that what else the machine does is the same for all; times are the least, ratios the
medians of those of each round.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import typer
from rich.console import Console

from engine.mlx_backend.attention.cascade import CascadeAttention
from engine.mlx_backend.attention.dispatch import scaled_dot_product_attention
from engine.mlx_backend.attention.strategy import Attention, GatherAttention
from engine.mlx_backend.model.forward import Forward, Piece
from kvstore.arena import Arena, LayerShape
from load_tests.report import Table

HEADS, KV_HEADS, DIM, BLOCK_SIZE = 8, 4, 64, 32
SHAPE = LayerShape(KV_HEADS, DIM, DIM, mx.float32, mx.float32)
N_LAYERS = 4
"""Enough that no layer finds its blocks in the processor's cache."""


@dataclass(frozen=True, slots=True)
class Decode:
    """Rows of so many tokens, the first `shared` of them the same."""

    name: str
    contexts: Sequence[int]
    shared: int = 0


DECODES = (
    Decode("1 x 512", [512]),
    Decode("8 x 512", [512] * 8),
    Decode("16 x 512", [512] * 16),
    Decode("32 x 512", [512] * 32),
    Decode("32 of 100 to 1,867", range(100, 1900, 57)),
    Decode("15 x 300 + 1 x 30,000", [*[300] * 15, 30_000]),
    Decode("16 x 1,190, sharing 1,160", [1190] * 16, 1160),
    Decode("1 x 30,000", [30_000]),
)
CHUNKS = ((0, 512), (4_096, 512), (12_288, 512), (30_000, 128))
"""Tokens before the chunk, tokens in it."""


def pieces_of(decode: Decode, n_blocks: int) -> list[Piece]:
    """The last token of each row, over tables of shuffled blocks; sorted by table."""
    free = iter(np.random.default_rng(0).permutation(n_blocks).tolist())
    prefix = [next(free) for _ in range(decode.shared // BLOCK_SIZE)]
    tables = [
        prefix + [next(free) for _ in range(-(-n // BLOCK_SIZE) - len(prefix))]
        for n in decode.contexts
    ]
    rows = sorted(zip(tables, decode.contexts, strict=True))
    return [Piece(n - 1, 1, np.array(blocks, dtype=np.uint32)) for blocks, n in rows]


def filled_arena(n_blocks: int) -> Arena:
    arena = Arena([SHAPE] * N_LAYERS, n_blocks, BLOCK_SIZE)
    for layer in arena.layers:
        ids = mx.arange(n_blocks)
        layer.put_blocks(0, *(random(*array.shape) for array in layer.blocks(ids)))
        mx.eval(layer.arrays())
    return arena


def random(*shape: int) -> mx.array:
    array = mx.random.normal(shape)
    mx.eval(array)
    return array


def stepper(arena: Arena, pieces: Sequence[Piece], attention: Attention) -> Callable[[], mx.array]:
    """One forward's attention: each layer's queries follow from the layer before."""
    rows, length = len(pieces), pieces[0].n_tokens
    queries = random(rows, HEADS, length, DIM)
    new = random(rows, KV_HEADS, length, DIM)

    def step() -> mx.array:
        forward = Forward(pieces, arena)
        output = queries
        for view in attention.views(arena, forward):
            keys, values = view.update_and_fetch(new, new)
            mask = view.make_mask(length)
            output = scaled_dot_product_attention(output, keys, values, view, 0.125, mask)
        return output

    return step


def contiguous_stepper(start: int, length: int) -> Callable[[], mx.array]:
    """MLX's own attention over keys that nobody had to gather."""
    queries = random(1, HEADS, length, DIM)
    layers = [[random(1, KV_HEADS, start + length, DIM) for _ in "kv"] for _ in range(N_LAYERS)]

    def step() -> mx.array:
        output = queries
        for keys, values in layers:
            output = mx.fast.scaled_dot_product_attention(
                output, keys, values, scale=0.125, mask="causal"
            )
        return output

    return step


def alternate(steps: Mapping[str, Callable[[], mx.array]], rounds: int) -> dict[str, list[float]]:
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
    base, other = times.values()
    ratio = statistics.median(b / a for a, b in zip(base, other, strict=True))
    return name, f"{min(base):.2f}", f"{min(other):.2f}", f"{ratio:.2f}"


def main(rounds: int = 9) -> None:
    """Measure decodes and chunks on the device that MLX takes by default."""
    console = Console(width=100)
    decodes = []
    for decode in DECODES:
        n_blocks = sum(-(-n // BLOCK_SIZE) for n in decode.contexts)
        arena, pieces = filled_arena(n_blocks), pieces_of(decode, n_blocks)
        strategies: dict[str, Attention] = {
            "gather": GatherAttention(),
            "cascade": CascadeAttention(),
        }
        steps = {name: stepper(arena, pieces, one) for name, one in strategies.items()}
        decodes.append(line(decode.name, alternate(steps, rounds)))
    console.print(
        Table(("decode, ms a layer", "gather", "cascade", "ratio"), tuple(decodes)).rich()
    )
    chunks = []
    for start, length in CHUNKS:
        n_blocks = -(-(start + length) // BLOCK_SIZE)
        blocks = np.arange(n_blocks, dtype=np.uint32)[::-1]
        piece = Piece(start, length, blocks)
        steps = {
            "contiguous": contiguous_stepper(start, length),
            "cascade": stepper(filled_arena(n_blocks), [piece], CascadeAttention()),
        }
        chunks.append(line(f"{length} behind {start:,}", alternate(steps, max(1, rounds // 3))))
    console.print(
        Table(("chunk, ms a layer", "MLX's own", "cascade", "ratio"), tuple(chunks)).rich()
    )


if __name__ == "__main__":
    typer.run(main)
