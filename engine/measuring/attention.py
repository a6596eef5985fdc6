"""What attention costs by strategy, beside MLX's own over keys that nobody had to gather. No model.

Some layers of 16 heads over 8 KV heads of 128, blocks of 32 tokens in tables shuffled over the
arena. The kinds alternate, so that what else the machine does is the same for all.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import TypeAlias

import mlx.core as mx
import numpy as np

from engine.measuring.room import require_bytes
from engine.measuring.rounds import Figures, Sizes, rounds
from engine.mlx_backend.attention.dispatch import scaled_dot_product_attention
from engine.mlx_backend.attention.strategy import Attention, GatherAttention
from engine.mlx_backend.cpu.cascade import CascadeAttention
from engine.mlx_backend.model.forward import Forward, TokenSpan
from engine.mlx_backend.storage.arena import Arena, LayerShape
from kvstore.pool import blocks_for

HEADS, KV_HEADS, DIM, BLOCK_SIZE = 16, 8, 128, 32
SCALE = DIM**-0.5
N_LAYERS = 2
"""Enough that no layer finds its blocks in the processor's cache."""

_DRAWN = 1 << 20
"""Random numbers."""

Step: TypeAlias = Callable[[], mx.array | list[mx.array]]
"""Builds what is then evaluated."""


class AttentionMeasurement:
    """One token of each of so many rows, each behind as many others."""

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
        require_bytes(3 * arena_bytes)  # as much side by side, and as much gathered
        arena, spans = filled_arena(n_blocks, dtype), shuffled_spans([context] * rows)
        steps = {"contiguous": contiguous_stepper([context] * rows, 1, dtype)} | {
            one.name: stepper(arena, spans, one, dtype) for one in strategies(dtype)
        }
        return compared(alternate(steps, self._sizes.rounds, self._sizes.case_seconds))


def decode_cases(sizes: Sizes) -> dict[str, tuple[int, int]]:
    """Rows and tokens of each, by the name of the case."""
    return {
        f"{rows} x {context:,}": (rows, context)
        for context, rows in product(sizes.contexts, sizes.rows)
    }


def compared(times: Mapping[str, Sequence[float]]) -> Figures:
    """The median of each kind, and how many times as long as the first the others take."""
    base, *others = times
    figures = {f"{kind}_ms": statistics.median(taken) for kind, taken in times.items()}
    ratios = {f"{kind}_times": ratio(times[base], times[kind]) for kind in others}
    return {**figures, **ratios, "rounds": len(times[base])}


def ratio(base: Sequence[float], other: Sequence[float]) -> float:
    """The median of the rounds' own ratios: the machine's pace changes both sides."""
    return statistics.median(b / a for a, b in zip(base, other, strict=True))


def serving_dtype() -> mx.Dtype:
    """What most models' K and V come in on this device."""
    return mx.float32 if mx.default_device() == mx.cpu else mx.bfloat16


def layer_shape(dtype: mx.Dtype) -> LayerShape:
    return LayerShape(KV_HEADS, DIM, DIM, dtype, dtype)


def shuffled_spans(contexts: Sequence[int], shared_tokens: int = 0) -> list[TokenSpan]:
    """The last token of each row, over tables of shuffled blocks; sorted by table.

    All rows begin with the same whole blocks of `shared_tokens`.
    """
    n_blocks = sum(blocks_for(n, BLOCK_SIZE) for n in contexts)
    free = iter(np.random.default_rng(0).permutation(n_blocks).tolist())
    prefix = [next(free) for _ in range(shared_tokens // BLOCK_SIZE)]
    tables = [
        prefix + [next(free) for _ in range(blocks_for(n, BLOCK_SIZE) - len(prefix))]
        for n in contexts
    ]
    rows = sorted(zip(tables, contexts, strict=True))
    return [TokenSpan(n - 1, 1, np.array(blocks, dtype=np.uint32)) for blocks, n in rows]


def filled_arena(n_blocks: int, dtype: mx.Dtype) -> Arena:
    """Of random numbers."""
    arena = Arena([layer_shape(dtype)] * N_LAYERS, n_blocks, BLOCK_SIZE)
    ids = mx.arange(n_blocks)
    for layer in arena.layers:
        layer.put_blocks(0, *(random(dtype, *array.shape) for array in layer.blocks(ids)))
        mx.eval(layer.arrays())
    return arena


def random(dtype: mx.Dtype, *shape: int) -> mx.array:
    """Random numbers, the same ones again and again where there are many: to draw them all would
    take longer than to attend to them.
    """
    size = math.prod(shape)
    drawn = mx.random.normal((min(size, _DRAWN),)).astype(dtype)
    array = mx.tile(drawn, -(-size // _DRAWN))[:size].reshape(shape)
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
    mask: mx.array | str | None = None if length == 1 else "causal"
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


def alternate(
    steps: Mapping[str, Step], most_rounds: int, seconds: float = math.inf
) -> dict[str, list[float]]:
    """Milliseconds a layer of each kind in each round, after one that is not counted.

    Fewer rounds where they take longer than `seconds`.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    for done in rounds(1 + most_rounds, seconds):
        for name, step in steps.items():
            started = time.perf_counter()
            mx.eval(step())
            if done > 0:
                times[name].append(1e3 * (time.perf_counter() - started) / N_LAYERS)
    return times


def strategies(dtype: mx.Dtype) -> list[Attention]:
    """Those that take the dtype here: on a CPU `cascade` takes float32 alone."""
    takes_all = dtype == mx.float32 or mx.default_device() != mx.cpu
    return [GatherAttention(), CascadeAttention()] if takes_all else [GatherAttention()]
