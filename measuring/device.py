"""The device alone: its facts, attention, the check at load, and whether writes copy the arena.

Attention is measured without a model, by strategy and by layout of the arena: a few layers of 16
heads over 8 KV heads of 128, with blocks of 32 tokens in shuffled tables. The kinds that are
compared take turns, so that other load on the machine affects all of them alike. The check at load
and the writes are measured with tiny random checkpoints.
"""

import gc
import math
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import TypeAlias

import mlx.core as mx
import numpy as np

from engine.core.step import (
    NO_STEP_MASKS,
    BatchEntry,
    Decode,
    Prefill,
    Sampling,
    SequenceId,
    StepPlan,
)
from engine.mlx_backend import host
from engine.mlx_backend.attentions import attentions, attentions_to_measure
from engine.mlx_backend.blas import load_blas
from engine.mlx_backend.decode.choice import DecodePath
from engine.mlx_backend.decode.compiled import CompiledDecode
from engine.mlx_backend.kv.arena import Arena, LayerArena
from engine.mlx_backend.kv.shape import LayerShape, token_bytes
from engine.mlx_backend.kv.storage import Storage
from engine.mlx_backend.loading.loader import LoadedModel, load_weights, open_model
from engine.mlx_backend.model.attention import Attention
from engine.mlx_backend.model.cached_model import CachedModel, Execution
from engine.mlx_backend.model.rows import ArenaForward, RowGroup, TokenSpan
from engine.mlx_backend.model.views import LayerView, scaled_dot_product_attention
from engine.mlx_backend.runner import Launch, MlxRunner
from engine.mlx_backend.sampling.sampler import Sampler
from engine.values.request import SamplingParams
from kvstore.ops import TablePatch
from kvstore.pool import blocks_for
from kvstore.sizes import StorageSizes
from measuring.doctor import Cases, Figures, Sizes, package_versions, rounds
from measuring.random_checkpoint import CONFIGS, VOCAB_SIZE, tiny_tokenizer, write_checkpoint

HEADS, KV_HEADS, DIM, BLOCK_SIZE = 16, 8, 128, 32
SCALE = DIM**-0.5
N_LAYERS = 2
"""Enough that the processor's cache does not hold a layer's blocks until the next round."""

_DRAWN = 1 << 20
"""Random numbers that are drawn. Larger arrays repeat them: drawing takes longer than attention."""

_FREE_SHARE = 0.8
"""Of free memory, what a case may take. The memory of other processes grows, too."""

Step: TypeAlias = Callable[[], mx.array | list[mx.array]]
"""Builds a lazy computation, whose evaluation is measured."""

Gather: TypeAlias = Callable[[LayerArena], tuple[mx.array, mx.array]]
"""K and V of all rows, `[rows, kv_heads, tokens, dim]`, contiguous or strided."""

Attend: TypeAlias = Callable[[mx.array, mx.array, mx.array], mx.array]
"""Attention of queries over keys and values."""

DONATION_BLOCK_SIZE = 8
ROWS, PROMPT_TOKENS, CHUNK_TOKENS, STEPS = 4, 40, 30, 20
ROW_BLOCKS = 100
"""Blocks of each row: enough for all chunks of the first row."""

_NAMES = tuple(map(SequenceId, range(ROWS)))
_DONATION_ARCHITECTURE = "qwen3"
_SEED = 0
_CHIP_FACTS = ("architecture", "compute_capability_major", "driver_version")
"""Keys of `mx.device_info` that only some devices have."""


def machine_facts() -> Figures:
    """The device, its memory, and the software, without the machine's name."""
    machine, info = host.examine(), mx.device_info()
    chip = {name: info[name] for name in _CHIP_FACTS if name in info}
    backends = {"metal": mx.metal.is_available(), "cuda": mx.cuda.is_available()}
    return {
        "device": machine.device,
        **chip,
        "backend": next((name for name, is_there in backends.items() if is_there), "cpu"),
        "memory_gib": machine.memory_bytes / 2**30,
        "free_gib": machine.left_bytes / 2**30,
        "cores": os.cpu_count() or 0,
        "load_average": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
        "blas": load_blas().brief,
        **package_versions(),
    }


class TooLarge(MemoryError):
    """The case takes more memory than is free."""


def require_bytes(n_bytes: int) -> None:
    """Raises TooLarge if this memory is not free: on a GPU the process may not survive the attempt
    to allocate it.
    """
    left_bytes = host.examine().left_bytes
    if n_bytes > _FREE_SHARE * left_bytes:
        raise TooLarge(
            f"it takes {n_bytes / 2**30:.1f} GiB, and {left_bytes / 2**30:.1f} GiB are free"
        )


def attention_cases(sizes: Sizes) -> Cases:
    """Attention of one decoded token of each row, by strategy, and MLX's over contiguous keys."""

    def measure(rows: int, context_tokens: int) -> Figures:
        dtype = _serving_dtype()
        # The arena, as much that is contiguous, and as much that is gathered.
        arena, spans = _decode(rows, context_tokens, dtype, copies=3)
        steps = {"contiguous": contiguous_stepper([context_tokens] * rows, 1, dtype)} | {
            one.name: stepper(arena, spans, one, dtype) for one in attentions_to_measure(dtype)
        }
        return _compared(alternate(steps, sizes.rounds, sizes.case_seconds))

    return _by_rows_and_context(sizes, measure)


def layout_cases(sizes: Sizes) -> Cases:
    """Gather and attention in two layouts of the arena: the engine's, `[blocks, heads,
    block, dim]`, and `[blocks, block, heads, dim]`, whose blocks are gathered whole and attended to
    through strides.

    MLX's Metal backend copies strided keys when several rows decode, and reads them in place when
    one row does. So attention in the other layout is also measured row by row. Both layouts read
    the same memory, so their numbers mean different things and their outputs differ.
    """

    def measure(rows: int, context_tokens: int) -> Figures:
        dtype = _serving_dtype()
        # The arena, and as much that is gathered.
        arena, spans = _decode(rows, context_tokens, dtype, copies=2)
        table = mx.array(np.stack([span.blocks for span in spans]))
        queries = random(dtype, rows, HEADS, 1, DIM)
        gathers = {"today": gather_heads(arena, table), "other": gather_blocks(table)}
        steps = {name: attending(arena, queries, gather) for name, gather in gathers.items()}
        steps["other_by_row"] = attending(arena, queries, gathers["other"], attend_by_row)
        for name, gather in gathers.items():
            steps[f"{name}_gather"] = partial(_gather_all, arena, gather)
        figures = _compared(alternate(steps, sizes.rounds, sizes.case_seconds))
        return {name: figures[name] for name in figures if not name.endswith("gather_times")}

    return _by_rows_and_context(sizes, measure)


def _by_rows_and_context(sizes: Sizes, measure: Callable[[int, int], Figures]) -> Cases:
    """Cases of whole blocks in every row. They raise TooLarge."""
    return {
        f"{rows} x {context:,}": partial(measure, rows, context)
        for context, rows in product(sizes.contexts, sizes.rows)
    }


def _serving_dtype() -> mx.Dtype:
    """The dtype of most models' K and V on this device."""
    return mx.float32 if mx.default_device() == mx.cpu else mx.bfloat16


def _decode(
    rows: int, context_tokens: int, dtype: mx.Dtype, copies: int
) -> tuple[Arena, list[TokenSpan]]:
    """An arena, and the last token of each row. Raises TooLarge if `copies` arenas do not fit."""
    n_blocks = rows * blocks_for(context_tokens, BLOCK_SIZE)
    require_bytes(copies * N_LAYERS * _layer_shape(dtype).token_bytes * n_blocks * BLOCK_SIZE)
    return filled_arena(n_blocks, dtype), shuffled_spans([context_tokens] * rows)


def _compared(times: Mapping[str, Sequence[float]]) -> Figures:
    """The median time of each kind, and its ratio to the first kind's."""
    base, *others = times
    figures = {f"{kind}_ms": statistics.median(taken) for kind, taken in times.items()}
    ratios = {f"{kind}_times": ratio(times[base], times[kind]) for kind in others}
    return {**figures, **ratios, "rounds": len(times[base])}


def ratio(base: Sequence[float], other: Sequence[float]) -> float:
    """The median of the rounds' own ratios: load on the machine changes both sides of a round."""
    return statistics.median(b / a for a, b in zip(base, other, strict=True))


def _layer_shape(dtype: mx.Dtype) -> LayerShape:
    return LayerShape(KV_HEADS, DIM, DIM, dtype, dtype)


def shuffled_spans(contexts: Sequence[int], shared_tokens: int = 0) -> list[TokenSpan]:
    """The last token of each row, with tables of shuffled blocks, sorted by table.

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
    """An arena of random numbers."""
    arena = Arena([_layer_shape(dtype)] * N_LAYERS, n_blocks, BLOCK_SIZE)
    ids = mx.arange(n_blocks)
    for layer in arena.layers:
        layer.put_blocks(0, *(random(dtype, *array.shape) for array in layer.blocks(ids)))
        mx.eval(layer.planes)
    return arena


def random(dtype: mx.Dtype, *shape: int) -> mx.array:
    """Random numbers, which repeat in large arrays."""
    size = math.prod(shape)
    drawn = mx.random.normal((min(size, _DRAWN),)).astype(dtype)
    array = mx.tile(drawn, -(-size // _DRAWN))[:size].reshape(shape)
    mx.eval(array)
    return array


def stepper(
    arena: Arena, spans: Sequence[TokenSpan], attention: Attention, dtype: mx.Dtype
) -> Step:
    """The attention of one forward. The output of a layer is the next layer's queries."""
    rows, length = len(spans), spans[0].n_tokens
    queries = random(dtype, rows, HEADS, length, DIM)
    new = random(dtype, rows, KV_HEADS, length, DIM)

    def step() -> mx.array:
        forward = RowGroup(spans, arena)
        output = queries
        prepared = attention.prepare(forward, None)
        for layer in arena.layers:
            view = LayerView(layer, ArenaForward([forward], stands_in=True), None, [prepared])
            keys, values = view.update_and_fetch(new, new)
            mask = view.make_mask(length)
            output = scaled_dot_product_attention(output, keys, values, view, SCALE, mask)
        return output

    return step


def contiguous_stepper(contexts: Sequence[int], length: int, dtype: mx.Dtype) -> Step:
    """MLX's own attention of `length` tokens of each row over contiguous keys.

    Shorter rows are padded and masked, as mlx-lm does.
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


def gather_heads(arena: Arena, table: mx.array) -> Gather:
    """Gather in the engine's layout: one run of memory for each head of a block."""
    heads = arena.gather_ids(table, arena.layers[0].heads)
    return lambda layer: layer.read(heads)


def gather_blocks(table: mx.array) -> Gather:
    """Gather in the other layout: one run of memory for each block, with strided heads."""
    rows, blocks = table.shape

    def strided(pool: mx.array) -> mx.array:
        runs = pool.reshape(-1, BLOCK_SIZE * KV_HEADS * DIM)[table]
        return runs.reshape(rows, blocks * BLOCK_SIZE, KV_HEADS, DIM).swapaxes(1, 2)

    return lambda layer: (
        strided(layer.planes[0][: layer.n_heads * BLOCK_SIZE]),
        strided(layer.planes[-1][layer.values_at * BLOCK_SIZE :]),
    )


def _gather_all(arena: Arena, gather: Gather) -> list[mx.array]:
    return [array for layer in arena.layers for array in gather(layer)]


def attend_together(queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
    """MLX's attention of all rows in one call."""
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=SCALE, mask=None)


def attend_by_row(queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
    """MLX's attention, one call a row."""
    rows = [slice(row, row + 1) for row in range(len(queries))]
    return mx.concatenate([attend_together(queries[row], keys[row], values[row]) for row in rows])


def attending(
    arena: Arena, queries: mx.array, gather: Gather, attend: Attend = attend_together
) -> Step:
    """Gather and attention of every layer. The output of a layer is the next layer's queries."""

    def step() -> mx.array:
        output = queries
        for layer in arena.layers:
            output = attend(output, *gather(layer))
        return output

    return step


def alternate(
    steps: Mapping[str, Step], most_rounds: int, seconds: float = math.inf
) -> dict[str, list[float]]:
    """Milliseconds a layer of each kind in each round, after a first round that is not counted.

    After `seconds` no round begins.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    for done in rounds(1 + most_rounds, seconds):
        for name, step in steps.items():
            started = time.perf_counter()
            mx.eval(step())
            if done > 0:
                times[name].append(1e3 * (time.perf_counter() - started) / N_LAYERS)
    return times


def load_check_cases(sizes: Sizes, scratch: Path) -> Cases:
    """The daemon's check at load of every architecture, in each of `checked_dtypes`."""
    return {
        f"{name}, {str(dtype).removeprefix('mlx.core.')}": partial(
            _load_check, name, dtype, scratch
        )
        for dtype in checked_dtypes(mx.default_device())
        for name in sizes.architectures or CONFIGS
    }


def checked_dtypes(device: mx.Device) -> tuple[mx.Dtype, ...]:
    """Float32, which shows an error best, and on GPUs bfloat16, which most models have. A CPU
    serves all checkpoints in float32.
    """
    return (mx.float32,) if device == mx.cpu else (mx.float32, mx.bfloat16)


def _load_check(architecture: str, dtype: mx.Dtype, scratch: Path) -> Figures:
    """How the architecture would be served. Raises ModelError, and whatever the model raises."""
    _, execution = _load(architecture, dtype, scratch)
    mx.clear_cache()
    return {
        "batches": execution.batching.name,
        "attention": execution.attention.name,
        "deviation": execution.deviation,
        "rejected_before": len(execution.rejected),
    }


def _load(architecture: str, dtype: mx.Dtype, scratch: Path) -> tuple[LoadedModel, Execution]:
    """Load a tiny random checkpoint as the daemon does, and remove it. Raises ModelError."""
    with tempfile.TemporaryDirectory(dir=scratch) as parent:
        checkpoint = Path(parent) / "checkpoint"
        write_checkpoint(checkpoint, CONFIGS[architecture], _SEED, tiny_tokenizer(), dtype)
        loaded = open_model(checkpoint, host.examine().left_bytes)
        return loaded, load_weights(loaded, attentions("auto", loaded), lambda line: None)


def donation_cases(sizes: Sizes, scratch: Path) -> Cases:
    """Whether writes to the arena are in place while a step is in flight, for both launches, and
    whether those of compiled decodes are.

    A write is in place if MLX donates the pool's buffer to it, which it does while nothing else
    refers to the buffer; on a GPU, a step in flight may. The backend's choice of a launch for each
    device rests on this measurement. The cases raise TooLarge.
    """

    def measure(steps: Callable[[CachedModel, Launch], Figures], launch: Launch) -> Figures:
        return steps(_model_with_pools(sizes.pool_bytes, scratch), launch)

    return {
        "launched ahead": partial(measure, steps_in_flight, Launch.AHEAD),
        "launched when idle": partial(measure, steps_in_flight, Launch.WHEN_IDLE),
        "compiled, launched ahead": partial(measure, compiled_in_flight, Launch.AHEAD),
        "compiled, launched when idle": partial(measure, compiled_in_flight, Launch.WHEN_IDLE),
    }


def _model_with_pools(pool_bytes: int, scratch: Path) -> CachedModel:
    """A tiny model over an arena whose pools have about `pool_bytes` each. Raises TooLarge."""
    loaded, execution = _load(_DONATION_ARCHITECTURE, mx.float32, scratch)
    first = loaded.layout.kv_layers[0]
    block_bytes = DONATION_BLOCK_SIZE * first.kv_heads * first.key_dim * first.key_dtype.size
    n_blocks = max(pool_bytes // block_bytes, ROWS * ROW_BLOCKS)
    arena_bytes = n_blocks * DONATION_BLOCK_SIZE * token_bytes(loaded.layout.kv_layers)
    require_bytes(2 * arena_bytes)  # in case all pools are copied
    storage = Storage(loaded.layout, StorageSizes(n_blocks), DONATION_BLOCK_SIZE)
    return CachedModel(loaded.model, loaded.layout, storage, execution)


def steps_in_flight(model: CachedModel, launch: Launch) -> dict[str, float]:
    """Run steps of one chunk and several decodes, each submitted before the last is collected."""
    runner = MlxRunner(model, Sampler(VOCAB_SIZE), launch)
    starts = range(PROMPT_TOKENS, PROMPT_TOKENS + STEPS * CHUNK_TOKENS, CHUNK_TOKENS)
    chunks = [Prefill(_NAMES[0], start, _tokens(CHUNK_TOKENS)) for start in starts]
    plans = [StepPlan(rows=[chunk, *map(Decode, _NAMES[1:])]) for chunk in chunks]
    return memory_of_steps(model, runner, plans)


def compiled_in_flight(model: CachedModel, launch: Launch) -> dict[str, float]:
    """Run compiled decodes, each submitted before the last is collected. Raises Unfit."""
    path, compiled = DecodePath(""), CompiledDecode(model, wanted_steps=1)
    path.use(compiled)
    runner = MlxRunner(model, Sampler(VOCAB_SIZE), launch, decode=path)
    plans = [StepPlan(rows=list(map(Decode, _NAMES))) for _ in range(STEPS)]
    figures = memory_of_steps(model, runner, plans)
    return {**figures, "compiled_steps": compiled.steps[""]}


def memory_of_steps(
    model: CachedModel, runner: MlxRunner, plans: Sequence[StepPlan]
) -> dict[str, float]:
    """Let `_NAMES` enter the batch and run these steps of theirs, each in flight when the next is
    submitted.

    Returns the size of one layer's pool of K; the peak above the memory in use before the batch was
    filled, and what MLX has kept for later, all in MiB; the larger of both over the pool; and the
    time of a step.
    """
    gc.collect()  # the model of an earlier case may still be there
    before = mx.get_active_memory()  # or what is kept from the first step on would not be seen
    runner.submit(_prompts(_NAMES))
    runner.launch()
    runner.draw(NO_STEP_MASKS)
    mx.synchronize()
    mx.clear_cache()  # or a copy would take the place of what is left of earlier work
    mx.reset_peak_memory()
    started = time.perf_counter()
    for plan in plans:
        runner.submit(plan)
        runner.collect()
        runner.launch()
        runner.draw(NO_STEP_MASKS)
    runner.collect()
    seconds = time.perf_counter() - started
    pool_bytes = model.storage.full.layers[0].planes[0].nbytes
    peak_bytes, cached_bytes = mx.get_peak_memory() - before, mx.get_cache_memory()
    return {
        "pool_mib": pool_bytes / 2**20,
        "peak_mib": peak_bytes / 2**20,
        "cached_mib": cached_bytes / 2**20,
        "pools_times": max(peak_bytes, cached_bytes) / pool_bytes,
        "step_ms": 1e3 * seconds / len(plans),
    }


def _prompts(names: Sequence[SequenceId]) -> StepPlan:
    """A plan in which all rows enter, get their tables, and compute their prompts."""
    entry = Sampling(SamplingParams(temperature=0), seed=0)
    return StepPlan(
        enter=[BatchEntry(name, entry) for name in names],
        patches=[
            (name, TablePatch(None, 0, tuple(range(ROW_BLOCKS * name, ROW_BLOCKS * (name + 1)))))
            for name in names
        ],
        rows=[Prefill(name, 0, _tokens(PROMPT_TOKENS), samples=True) for name in names],
    )


def _tokens(n_tokens: int) -> tuple[int, ...]:
    return tuple(37 * i % VOCAB_SIZE for i in range(n_tokens))
