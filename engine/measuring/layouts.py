"""Gathering and attending to it in two layouts of the arena: today's, `[blocks, heads, block,
dim]`, and `[blocks, block, heads, dim]`, whose blocks are gathered whole and attended to through
strides (ADR 3). In a decode of several rows MLX's Metal backend copies what lies so, in one of a
single row it does not: so the other layout is attended to row by row as well.

Both read the same numbers of the same arena, as if they were laid out so: what they say is not the
same. `storage/arena.py` has today's; of the other there is no more than here.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import mlx.core as mx
import numpy as np

from engine.measuring.attention import (
    BLOCK_SIZE,
    DIM,
    HEADS,
    KV_HEADS,
    N_LAYERS,
    SCALE,
    Step,
    alternate,
    compared,
    decode_cases,
    filled_arena,
    layer_shape,
    random,
    serving_dtype,
    shuffled_spans,
)
from engine.measuring.room import require_bytes
from engine.measuring.rounds import Figures, Sizes
from engine.mlx_backend.storage.arena import Arena, LayerArena
from kvstore.pool import blocks_for

Gather: TypeAlias = Callable[[LayerArena], tuple[mx.array, mx.array]]
"""K and V of all rows, `[rows, kv_heads, tokens, dim]`, contiguous or not."""

Attend: TypeAlias = Callable[[mx.array, mx.array, mx.array], mx.array]
"""Of queries, keys and values."""


class LayoutMeasurement:
    """Decodes of rows of whole blocks: no mask, nothing is written."""

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes
        self._cases = decode_cases(sizes)

    def cases(self) -> Sequence[str]:
        return list(self._cases)

    def measure(self, case: str) -> Figures:
        """Medians, in milliseconds a layer. Raises TooLarge."""
        rows, context = self._cases[case]
        dtype = serving_dtype()
        n_blocks = rows * blocks_for(context, BLOCK_SIZE)
        arena_bytes = N_LAYERS * layer_shape(dtype).token_bytes * n_blocks * BLOCK_SIZE
        require_bytes(2 * arena_bytes)
        arena = filled_arena(n_blocks, dtype)
        table = mx.array(np.stack([span.blocks for span in shuffled_spans([context] * rows)]))
        queries = random(dtype, rows, HEADS, 1, DIM)
        gathers = {"today": heads_outside(arena, table), "other": heads_inside(table)}
        steps = {name: attending(arena, queries, gather) for name, gather in gathers.items()}
        steps["other_by_row"] = attending(arena, queries, gathers["other"], by_row)
        gathering = {f"{name}_gather": gathered(arena, gather) for name, gather in gathers.items()}
        times = alternate(steps | gathering, self._sizes.rounds, self._sizes.case_seconds)
        figures = compared(times)
        return {name: figures[name] for name in figures if not name.endswith("gather_times")}


def heads_outside(arena: Arena, table: mx.array) -> Gather:
    """Today's layout, as the engine reads it: a run of memory for each head of a block."""
    heads = arena.head_ids(table, KV_HEADS)
    return lambda layer: layer.read(heads)


def heads_inside(table: mx.array) -> Gather:
    """The other layout: one run of memory for a block, and heads by their stride."""
    rows, blocks = table.shape

    def gather(layer: LayerArena) -> tuple[mx.array, mx.array]:
        return of(layer.key_blocks()), of(layer.value_blocks())

    def of(pool: mx.array) -> mx.array:
        runs = pool.reshape(-1, BLOCK_SIZE * KV_HEADS * DIM)[table]
        return runs.reshape(rows, blocks * BLOCK_SIZE, KV_HEADS, DIM).swapaxes(1, 2)

    return gather


def together(queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
    """MLX's attention."""
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=SCALE, mask=None)


def by_row(queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
    """The same, a row at a time."""
    rows = [slice(row, row + 1) for row in range(len(queries))]
    return mx.concatenate([together(queries[row], keys[row], values[row]) for row in rows])


def attending(arena: Arena, queries: mx.array, gather: Gather, attend: Attend = together) -> Step:
    """Each layer's queries follow from the layer before."""

    def step() -> mx.array:
        output = queries
        for layer in arena.layers:
            output = attend(output, *gather(layer))
        return output

    return step


def gathered(arena: Arena, gather: Gather) -> Step:
    """The gather alone."""
    return lambda: [array for layer in arena.layers for array in gather(layer)]
