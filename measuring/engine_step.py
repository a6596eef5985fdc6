"""A step of a whole engine: its time, its memory, and its time under limits of command buffers.

EngineHarness runs the daemon's engine without its thread, and BareModel is the baseline for its
steps: mlx-lm's model with mlx-lm's own caches and no engine. The load tests use both.
"""

import gc
import itertools
import math
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.utils import tree_reduce
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache
from mlx_lm.utils import load_model

from engine.build import assemble
from engine.core.inbox import Inbox
from engine.mlx_backend import assembly
from engine.mlx_backend.blas import load_blas
from engine.mlx_backend.kv.formats import dtype_name
from engine.mlx_backend.kv.layout import Layout
from engine.mlx_backend.kv.shape import token_bytes
from engine.mlx_backend.loading.compiler import start_compiler
from engine.mlx_backend.loading.memory import footprint, least_kv_bytes
from engine.values.output import OutputEvent
from engine.values.request import Request, SamplingParams
from engine.values.settings import EngineConfig
from engine.values.stats import DecodeStats
from engine.values.tokens import pack
from kvstore.pool import blocks_for
from measuring.doctor import BUFFER_OPERATIONS, Cases, Figures, MeasureConfig, rounds

STEPS = 8
"""Steps of one round."""

WARM_UP_ROUNDS = 2

APART_TOKENS = 5
"""Rows are of lengths that differ by this, within a block. In a server, too, rows begin their
blocks at unlike steps.
"""

_GREEDY = SamplingParams(temperature=0.0)

_PREFILL_TOKENS = 512
"""Tokens of a prompt that the bare model computes in one forward."""

_LOGITS_TOKENS = 64
"""Tokens of a text that the bare model computes in one forward."""

_MEMORY_MAX_TOKENS = 64
"""Enough that the first row still decodes when the last prompt has been computed."""


class NotApplicable(Exception):
    """The device has nothing of what the section measures."""


class BareModel:
    """One batch of rows of equal length, decoded greedily, without sharing.

    A step is the forward of one token a row, the argmax over its logits, and the evaluation of
    both: the tokens are known when it returns. An engine may serve the same model at the same time.
    """

    def __init__(self, model: Module, vocab_size: int) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._cache: list[KVCache] | list[QuantizedKVCache] = []
        self._tokens = mx.zeros((0,), dtype=mx.int32)

    def begin(
        self, rows: int, context_tokens: int, seed: int = 0, kv_bits: int | None = None
    ) -> None:
        """Replace the batch: compute prompts of random tokens, `[rows, context_tokens]`. `kv_bits`:
        of mlx-lm's quantized cache; None: K and V are stored as they are computed.
        """
        prompts = np.random.default_rng(seed).integers(0, self._vocab_size, (rows, context_tokens))
        self._cache = self._new_cache(kv_bits)
        self._tokens = mx.array(prompts[:, -1].astype(np.int32))
        starts = range(_PREFILL_TOKENS, context_tokens - 1, _PREFILL_TOKENS)
        for chunk in np.split(prompts[:, :-1], starts, axis=1):
            self._prefill(chunk)

    def logits(self, tokens: Sequence[int], kv_bits: int | None = None) -> mx.array:
        """Logits after each of a text's tokens, float32 `[tokens, vocabulary]`. Each chunk attends
        to what is stored of those before it.
        """
        cache, found = self._new_cache(kv_bits), list[mx.array]()
        for first in range(0, len(tokens), _LOGITS_TOKENS):
            chunk = mx.array([[*tokens[first : first + _LOGITS_TOKENS]]])
            found.append(self._model(chunk, cache=cache)[0].astype(mx.float32))
            mx.eval(found)
        return mx.concatenate(found)

    def bytes_per_token(self, n_tokens: int) -> float:
        """Bytes of the batch's K and V for each of the `n_tokens` that a row has."""
        held = tree_reduce(
            lambda n_bytes, array: n_bytes + array.nbytes,
            [[layer.keys, layer.values] for layer in self._cache],
            0,
        )
        return float(held) / (len(self._tokens) * n_tokens)

    def _new_cache(self, kv_bits: int | None) -> list[KVCache] | list[QuantizedKVCache]:
        plain: list[KVCache] = make_prompt_cache(self._model)
        return plain if kv_bits is None else [layer.to_quantized(bits=kv_bits) for layer in plain]

    def step_seconds(self) -> float:
        """Decode one token for each row."""
        start = time.perf_counter()
        logits = self._model(self._tokens[:, None], cache=self._cache)
        self._tokens = mx.argmax(logits[:, -1], axis=-1)
        mx.eval(self._tokens)
        return time.perf_counter() - start

    def prefill_seconds(self, n_tokens: int) -> float:
        """Compute `n_tokens` more tokens of each row."""
        tokens = np.zeros((self._tokens.shape[0], n_tokens), dtype=np.int32)
        start = time.perf_counter()
        self._prefill(tokens)
        return time.perf_counter() - start

    def _prefill(self, tokens: np.ndarray) -> None:
        self._model(mx.array(tokens.astype(np.int32)), cache=self._cache)
        mx.eval([layer.state for layer in self._cache])


def load_bare(checkpoint: Path) -> BareModel:
    """Load as mlx-lm does: in the checkpoint's own dtype."""
    model, config = load_model(checkpoint)
    return BareModel(model, int(config["vocab_size"]))


class EngineHarness:
    """The daemon's engine without its thread: the caller runs each turn of its loop.

    Its requests are random tokens that share nothing. `bare` is mlx-lm's model over the same
    weights.
    """

    def __init__(self, config: EngineConfig, rows: int, row_tokens: int) -> None:
        """Load the configured model, with room for `rows` rows of `row_tokens` tokens, or of the
        longest context that the model and the configuration allow if that is less.

        Raises ModelError.
        """
        gc.collect()  # or an earlier model's memory would be given back in the course of this one
        opened = assembly.open_configured(config)
        # Prompts may fill whole steps, so the first rows decode little until the last prompt is
        # computed. Without drafts a step is one token a row.
        config = replace(
            config, max_running=max(rows, 1), max_prompt_share=1.0, speculate="off", disk=None
        )
        layout = opened.loaded.layout
        longest = config.max_model_len or opened.loaded.max_context_tokens
        row_tokens = min(row_tokens, longest or row_tokens)
        config = replace(config, kv_cache_bytes=_kv_bytes(config, layout, rows, row_tokens))
        backend = assembly.assemble_opened(
            config, opened, load_blas(), lambda line: None, start_compiler()
        )
        self._events: list[OutputEvent] = []
        parts = assemble(backend, config, lambda line: None, Inbox(), self._events.extend)
        self._loop, self._limits = parts.loop, parts.limits
        self._vocab_size = layout.vocab_size
        self._names = itertools.count()
        self.bare = BareModel(opened.loaded.model, layout.vocab_size)
        self.memory = backend.memory
        self.step_bytes = opened.plan(config).step_bytes
        self.decode = backend.decode
        self.card = parts.card
        self._block_size = config.block_size

    def row_tokens(self, rows: int, most: int) -> list[int]:
        """The length of each row's prompt: `most`, and up to a block less."""
        return [max(most - APART_TOKENS * row % self._block_size, 1) for row in range(rows)]

    def begin(self, rows: int, prompt_tokens: int, max_tokens: int) -> None:
        """Abort all requests and submit `rows` new ones, whose prompts have `row_tokens`. Returns
        when each has a token. Each generates `max_tokens` tokens.

        Raises RuntimeError if one fails.
        """
        self._loop.abort_all()
        while not self._loop.is_idle:
            self._loop.turn()
        self._events.clear()
        prompts = [self.unique_prompt(n) for n in self.row_tokens(rows, prompt_tokens)]
        self.wait_for({self.submit(prompt, max_tokens) for prompt in prompts})

    def unique_prompt(self, n_tokens: int) -> tuple[int, ...]:
        """Random tokens, different from those of every other prompt."""
        return tuple(random.Random(next(self._names)).choices(range(self._vocab_size), k=n_tokens))

    def submit(self, prompt: tuple[int, ...], max_tokens: int) -> str:
        """Submit a request. Returns its id."""
        request = Request(
            f"r{next(self._names)}", pack(prompt), max_tokens, _GREEDY, ignore_eos=True
        )
        scheduler = self._loop.scheduler
        scheduler.add(scheduler.prepare(request), time.monotonic())
        return request.id

    def wait_for(self, request_ids: set[str]) -> None:
        """Run the loop until each of these requests has a token. Raises RuntimeError if a step
        fails.
        """
        while request_ids:
            self._loop.turn()
            if errors := [event.error for event in self._events if event.error]:
                raise RuntimeError(errors[0])
            request_ids -= {event.request_id for event in self._events if event.token_ids}

    def copied_blocks(self) -> int:
        """Blocks that were copied because a prompt ended its cached prefix within them."""
        return self._loop.scheduler.store.counters.prefix_copies

    def hit_share(self) -> float:
        """The share of all prompts' tokens that was found in the cache."""
        metrics = self._loop.scheduler.metrics
        return metrics.cached_prompt_tokens / max(metrics.queried_prompt_tokens, 1)

    def run(self, steps: int) -> float:
        """Run `steps` steps. Returns the seconds until the device is idle."""
        start = time.perf_counter()
        for _ in range(steps):
            self._loop.turn()
        mx.synchronize()  # a step that was launched ahead counts here
        return time.perf_counter() - start

    def decode_seconds(self, steps: int) -> float:
        """Decode `steps` tokens of each row. Raises RuntimeError if a row gets fewer or more."""
        rows, before = len(self._loop.scheduler.live), len(self._events)
        seconds = self.run(steps)
        generated = sum(len(event.token_ids) for event in self._events[before:])
        if generated != rows * steps:
            raise RuntimeError(f"{rows} rows generated {generated} tokens in {steps} steps")
        return seconds


def _kv_bytes(config: EngineConfig, layout: Layout, rows: int, row_tokens: int) -> int:
    """A KV cache with room for `rows` rows of `row_tokens` tokens, and for all windows of each.

    Windows get half of the cache, or what they need if that is less, so the cache may be larger.
    """
    kept = footprint(layout, config.block_size)
    blocks_bytes = rows * blocks_for(row_tokens, config.block_size) * kept.block_bytes
    if not kept.windows:
        return blocks_bytes + least_kv_bytes(config, kept)
    return 2 * (blocks_bytes + config.max_running * least_kv_bytes(config, kept))


def model_facts(config: EngineConfig) -> Figures:
    """The configured model's shape, without its name."""
    loaded = assembly.open_configured(config).loaded
    layout = loaded.layout
    return {
        "architecture": type(loaded.model).__module__.rpartition(".")[2],
        "weights_gib": loaded.weight_bytes / 2**30,
        "kv_bytes_a_token": token_bytes(layout.full_layers),
        "dtype": ", ".join(map(dtype_name, layout.dtypes)),
        "caches": len(layout.specs),
        "full_attention": len(layout.full_layers),
        "windows": ", ".join(map(str, layout.windows)),
        "states": len(layout.states),
        "query_heads": loaded.query_heads,
        "context_tokens": loaded.max_context_tokens or "not stated",
        "vocabulary": layout.vocab_size,
    }


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Medians over rounds: milliseconds a step, and the engine's time over the bare model's.

    `compiled_share`: the engine's steps that were compiled, of all. `decode`: how they are served,
    "compiled" or "eager".
    """

    engine_ms: float
    bare_ms: float
    engine_times: float
    least_times: float
    greatest_times: float
    compiled_share: float
    decode: str


def generated_tokens(most_rounds: int, rows: int, context_tokens: int, step_tokens: int) -> int:
    """An upper bound for the tokens that a row generates in a measurement of `most_rounds` rounds.

    Besides these rounds it has the uncounted ones, two rounds for steps launched ahead, and, for
    the first row, a token for each step in which the other rows' prompts are computed.
    """
    others_steps = (rows - 1) * math.ceil(context_tokens / max(step_tokens - rows, 1))
    return others_steps + STEPS * (WARM_UP_ROUNDS + most_rounds + 2)


def step_cases(config: MeasureConfig) -> Cases:
    """A decode step of the engine and of the bare model, for every number of rows and every context
    that the model supports. Raises ModelError.
    """
    sizes = config.sizes

    def generated(rows: int, context_tokens: int) -> int:
        return generated_tokens(sizes.rounds, rows, context_tokens, config.engine.step_tokens)

    most_rows, longest = max(sizes.rows), max(sizes.step_contexts)
    engine = EngineHarness(config.engine, most_rows, longest + generated(most_rows, longest))

    def measure(rows: int, context_tokens: int) -> Figures:
        limits = sizes.rounds, generated(rows, context_tokens), sizes.case_seconds
        return asdict(step_times(engine, rows, context_tokens, *limits))

    return {
        f"{rows} x {context:,}": partial(measure, rows, context)
        for context, rows in itertools.product(sizes.step_contexts, sizes.rows)
        if context + generated(rows, context) <= engine.card.max_sequence_tokens
    }


def step_times(
    engine: EngineHarness,
    rows: int,
    context_tokens: int,
    most_rounds: int,
    max_tokens: int,
    seconds: float = math.inf,
) -> StepTimes:
    """Compare decode steps of `rows` rows after unique prompts of up to `context_tokens` tokens.

    Rounds of the engine and of the bare model alternate, so both contexts grow alike; the first
    rounds are not counted, and after `seconds` no round begins. The rows of the bare model are of
    one length, the mean of the engine's. Both sides evaluate the tokens of every step. No row
    generates more than `max_tokens`. Raises RuntimeError if a step fails.
    """
    lengths = engine.row_tokens(rows, context_tokens)
    engine.begin(rows, context_tokens, max_tokens)
    engine.bare.begin(rows, max(round(statistics.mean(lengths)), 1))
    taken, before = list[tuple[float, float]](), engine.decode()
    counted = rounds(WARM_UP_ROUNDS + most_rounds, seconds)
    for done, times in zip(counted, _rounds(engine), strict=False):
        if done < WARM_UP_ROUNDS:
            before = engine.decode()
        else:
            taken.append(times)
    return median_times(taken, before, engine.decode())


def _rounds(engine: EngineHarness) -> Iterator[tuple[float, float]]:
    """The seconds of the engine and of the bare model, which alternate at going first."""

    def bare_seconds() -> float:
        return sum(engine.bare.step_seconds() for _ in range(STEPS))

    while True:
        ours = engine.decode_seconds(STEPS)
        yield ours, bare_seconds()
        theirs = bare_seconds()
        yield engine.decode_seconds(STEPS), theirs


def median_times(
    taken: Sequence[tuple[float, float]], before: DecodeStats, after: DecodeStats
) -> StepTimes:
    """`taken`: for each round the seconds of the engine and of the bare model. `before` and `after`
    these rounds.
    """
    ratios = [ours / theirs for ours, theirs in taken]
    steps = after.steps - before.steps
    return StepTimes(
        engine_ms=1e3 * statistics.median(ours for ours, _ in taken) / STEPS,
        bare_ms=1e3 * statistics.median(theirs for _, theirs in taken) / STEPS,
        engine_times=statistics.median(ratios),
        least_times=min(ratios),
        greatest_times=max(ratios),
        compiled_share=(after.compiled_steps - before.compiled_steps) / steps,
        decode=after.why.partition(":")[0],
    )


def memory_cases(config: MeasureConfig) -> Cases:
    """The memory of steps in addition to weights and storage, as MLX counts it, and what was
    reserved for it at load.

    The first case is the longest prompt that fits into the cache, the second one as many rows as
    may run together. The reservation is for the longest sequence that fits into the cache, so the
    cache is as large as these prompts. Raises ModelError.
    """
    rows = config.engine.max_running
    prompt_tokens = max(config.sizes.prompt_tokens // rows, 1)
    engine = EngineHarness(config.engine, rows, prompt_tokens + _MEMORY_MAX_TOKENS)

    def measure(rows: int, prompt_tokens: int) -> Figures:
        engine.begin(rows, prompt_tokens, _MEMORY_MAX_TOKENS)
        engine.run(STEPS)
        found = engine.memory()
        taken = found.peak - found.model.kept_bytes  # the peak since the model was loaded
        return {
            "reserved_mib": engine.step_bytes / 2**20,
            "taken_mib": taken / 2**20,
            "taken_times": taken / engine.step_bytes,
            "weights_mib": found.model.weights_bytes / 2**20,
            "storage_mib": (found.model.kv_bytes + found.model.states_bytes) / 2**20,
        }

    longest_prompt = engine.card.max_sequence_tokens - _MEMORY_MAX_TOKENS
    return {
        f"{n} x {tokens:,}": partial(measure, n, tokens)
        for n, tokens in ((1, longest_prompt), (rows, min(prompt_tokens, longest_prompt)))
    }


def command_buffer_cases(config: MeasureConfig, device: mx.Device | None = None) -> Cases:
    """A decode step by rows, after the shortest context, under each limit of BUFFER_OPERATIONS.

    MLX reads the limit once, from the environment of its process: every case measures under the
    limit of this process, and the plan of the section starts a process for each case. Raises
    NotApplicable on a CPU, and ModelError.
    """
    if (device or mx.default_device()) == mx.cpu:
        raise NotApplicable("MLX has no command buffers on a CPU")
    sizes = config.sizes
    context_tokens = min(sizes.step_contexts)
    most_rows, step_tokens = max(sizes.rows), config.engine.step_tokens
    max_tokens = generated_tokens(sizes.rounds, most_rows, context_tokens, step_tokens)
    engine = EngineHarness(config.engine, most_rows, context_tokens + max_tokens)

    def step_ms(rows: int) -> float:
        engine.begin(rows, context_tokens, max_tokens)
        counted = rounds(WARM_UP_ROUNDS + sizes.rounds, sizes.case_seconds)
        taken = [engine.decode_seconds(STEPS) for _ in counted]
        return 1e3 * statistics.median(taken[WARM_UP_ROUNDS:]) / STEPS

    def measure() -> Figures:
        times = {f"{rows}_rows_ms": step_ms(rows) for rows in sizes.rows}
        memory = engine.memory()
        return {
            **times,
            "taken_mib": (memory.peak - memory.model.kept_bytes) / 2**20,
            "cached_mib": memory.cached / 2**20,
        }

    return {f"{operations:,} operations": measure for operations in BUFFER_OPERATIONS}
