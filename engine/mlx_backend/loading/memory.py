"""How an engine divides memory among weights, storage and the work of a step.

`MemoryPlan` computes the division from numbers, before anything is loaded; `MeteredRunner` compares
it with what MLX has given out. In a plan a lease is one sequence's hold on the storage.
"""

import logging
import math
import sys
import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from operator import mul

import mlx.core as mx

from engine.api import ModelError
from engine.core.step import ModelRunner, StepMasks, StepPlan, StepResult
from engine.mlx_backend.host import FusedAttention, Machine, process_bytes
from engine.mlx_backend.kv.arena import block_bytes
from engine.mlx_backend.kv.states import state_bytes
from engine.mlx_backend.model.batching import FORWARD_TOKENS
from engine.mlx_backend.model.layout import Layout
from engine.mlx_backend.model.views import Attention
from engine.values.settings import EngineConfig
from engine.values.stats import MemoryPromise, MemoryStats
from kvstore.pool import blocks_for
from kvstore.sizes import StateCounts, StorageBytes, StorageSizes, WindowSize
from kvstore.window import lease_slots

logger = logging.getLogger(__name__)

USEFUL_STATES = 4
"""Saved states for each sequence that may run: a conversation leaves two or three of them."""

_MOST_LOGICAL_BLOCKS = 1 << 16
"""Blocks of a model without layers that keep every token: they are only counted, not allocated."""

_PROCESS_BYTES, _TOKEN_BYTES, _LOGIT_BYTES = 256 << 20, 64 << 10, 50
"""The most that the process and a step take, by peaks measured on a CPU: 36 MB for a prompt of 512
tokens through layers 1,024 and 4,096 wide, 470 MB to sample 64 rows of 151,936 logits. The process
grows by 110 MB between its first look at the memory and its first answer; the rest is for wider
layers."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that a model's layers keep; 0 where it has none of a kind."""

    block_bytes: int  # of a block in the layers that keep every token
    windows: tuple[tuple[int, int], ...] = ()  # (window, bytes of a block in its layers)
    state_bytes: int = 0  # of one sequence's recurrent state


def footprint(layout: Layout, block_size: int) -> Footprint:
    """The footprint of a model with blocks of `block_size` tokens."""
    return Footprint(
        block_bytes(layout.full_layers, block_size),
        tuple(
            (window, block_bytes(layout.layers_of(window), block_size)) for window in layout.windows
        ),
        state_bytes(layout.states),
    )


def least_kv_bytes(config: EngineConfig, footprint: Footprint) -> int:
    """The smallest KV cache: a block for each running sequence, and the windows of one."""
    return config.max_running * footprint.block_bytes + _lease_bytes(config, footprint)


def _lease_bytes(config: EngineConfig, footprint: Footprint) -> int:
    """Bytes of one lease's windows."""
    return sum(
        lease_slots(window, config.block_size, config.step_tokens) * block_bytes
        for window, block_bytes in footprint.windows
    )


def step_bytes(config: EngineConfig, vocab_size: int) -> int:
    """The arrays of a step, without weights, storage and attention's workspace."""
    logits = config.max_running * vocab_size
    return config.step_tokens * _TOKEN_BYTES + logits * _LOGIT_BYTES


GATHERED_BYTES = 1 << 30
"""K and V that a forward of several rows gathers in one layer at most; one row may need more.

A forward that needs more is split, which reads the weights once more. That is little against the
gather, which reads, writes and reads this much: a layer of 8 G parameters in 32 has half of it.
"""

_SCORE_BYTES, _MASK_BYTES = 4, 1
_SHORT_TOKENS, _VECTOR_QUERIES = 8, 32
_METAL_DIMS, _METAL_VECTOR_DIMS = frozenset({64, 72, 80, 96, 128}), frozenset({64, 96, 128})
_CUDNN_DIMS = frozenset(range(8, 129, 8))


@dataclass(frozen=True, slots=True)
class Workspace:
    """What attention takes while a forward is computed, in the one layer that takes most.

    A key is K and V of a token. A pair is a new token and a key of its row.
    """

    rows: int  # of a forward
    tokens: int  # of a forward, padding included
    key_bytes: int
    copies: int  # of all keys of a forward
    pair_bytes: int  # of any pair
    short_bytes: int = 0  # in addition, of a pair in a row of at most `_SHORT_TOKENS` tokens
    masked_bytes: int = 0  # in addition, of a pair whose mask is an array, in a window
    window_keys: int = 0  # of one row in the layers with the longest window

    def forward_keys(self, longest: int) -> int:
        """The most keys that a forward reads, as rows x those of its longest row.

        `longest`: tokens of the longest sequence that there can be.
        """
        affordable = GATHERED_BYTES // max(self.key_bytes, 1)
        return min(self.rows * longest, max(longest, affordable))

    def bytes(self, longest: int) -> int:
        """The most that one forward takes: K and V that it gathers, and scores and masks.

        Scores count once: softmax and mask write where they read. Tiles do not reduce them, because
        MLX computes the scores of many tiles before it attends to the first.
        """
        keys, pairs = self.forward_keys(longest), self.tokens * longest
        in_windows = self.tokens * min(longest, self.window_keys) * self.masked_bytes
        return (
            self.copies * keys * self.key_bytes
            + pairs * self.pair_bytes
            + min(_SHORT_TOKENS * keys, pairs) * self.short_bytes
            + in_windows
        )


def find_workspace(
    config: EngineConfig,
    layout: Layout,
    query_heads: int,
    attention: Attention,
    fused: FusedAttention,
) -> Workspace:
    """The workspace of a model whose layers have at most `query_heads` heads of queries.

    MLX keeps scores or not as `use_fallback` decides, in `scaled_dot_product_attention.cpp` of
    `mlx/backend/metal/` and `mlx/backend/cuda/`. On Metal the full kernel takes rows of more than 8
    tokens with heads of 64, 72, 80, 96 or 128, and the vector kernel shorter rows with heads of 64,
    96 or 128 and at most 32 queries for each KV head. On CUDA cuDNN takes half precision and heads
    of up to 128 in steps of 8. But of a boolean mask `mlx/fast.cpp` makes an additive one for each
    head there, from two arrays of that size: that of a window. Rows of full attention have none
    there, see `RowByRowAttention`.
    """
    layers, scores_bytes = layout.kv_layers, query_heads * _SCORE_BYTES
    dims = {*(shape.key_dim for shape in layers), *(shape.value_dim for shape in layers)}
    has_equal_dims = all(shape.key_dim == shape.value_dim for shape in layers)
    queries = [_SHORT_TOKENS * -(-query_heads // shape.kv_heads) for shape in layers]
    pair_bytes, short_bytes, masked_bytes = _MASK_BYTES + scores_bytes, 0, 0
    if fused is FusedAttention.METAL and has_equal_dims and dims <= _METAL_DIMS:
        is_vector = dims <= _METAL_VECTOR_DIMS and max(queries, default=0) <= _VECTOR_QUERIES
        pair_bytes, short_bytes = _MASK_BYTES, 0 if is_vector else scores_bytes
    elif (
        fused is FusedAttention.CUDA
        and has_equal_dims
        and dims <= _CUDNN_DIMS
        and {*layout.dtypes} <= {mx.float16, mx.bfloat16}
    ):
        pair_bytes, masked_bytes = _MASK_BYTES, scores_bytes  # two arrays in half precision
    window_slots = (
        lease_slots(window, config.block_size, config.step_tokens) for window in layout.windows
    )
    return Workspace(
        rows=config.max_running,
        tokens=config.step_tokens + FORWARD_TOKENS * config.max_running if layers else 0,
        key_bytes=max((shape.token_bytes for shape in layers), default=0),
        copies=attention.gathered_copies,
        pair_bytes=pair_bytes,
        short_bytes=short_bytes,
        masked_bytes=masked_bytes,
        window_keys=config.block_size * max(window_slots, default=0),
    )


@dataclass(frozen=True)
class MemoryPlan:
    """An engine's memory: what is kept, what steps take, and the limits of MLX's allocator.

    The fields are the input. Everything else raises ModelError, with the figures and the largest
    setting that would fit, if the settings do not fit or are too small to serve with.
    """

    config: EngineConfig
    machine: Machine  # before the weights are loaded
    weight_bytes: int
    footprint: Footprint
    workspace: Workspace
    vocab_size: int
    context_tokens: int  # of the longest sequence that the model can have

    @cached_property
    def sizes(self) -> StorageSizes:
        """How much storage of each kind there is."""
        if self._room_bytes < self._computing_bytes(0):
            raise ModelError(f"the model does not fit: {self._figures()}")
        kv_bytes, saved_bytes = self._wanted()
        room_bytes = self._room_bytes - self._running_bytes
        if self.footprint.state_bytes:
            room_bytes -= saved_bytes
        most_kv_bytes = self._most_kv_bytes(room_bytes)
        if most_kv_bytes < least_kv_bytes(self.config, self.footprint):
            raise self._too_large()
        if self.config.kv_cache_bytes is None:
            kv_bytes = min(kv_bytes, most_kv_bytes)
        sizes = self._divided(kv_bytes, saved_bytes)
        if self._bytes_of(sizes).arenas > most_kv_bytes:
            raise self._too_large()
        return sizes

    @cached_property
    def stored(self) -> StorageBytes:
        """The bytes of the storage."""
        return self._bytes_of(self.sizes)

    @property
    def arena_tokens(self) -> int:
        return self.sizes.n_blocks * self.config.block_size

    @property
    def most_keys(self) -> float:
        """Keys that a forward of several rows may read. Any number if no layer keeps every token:
        then windows are all that is gathered, few keys a row.
        """
        longest = min(self.context_tokens, self.arena_tokens)
        return self.workspace.forward_keys(longest) if self.footprint.block_bytes else math.inf

    @property
    def promise(self) -> MemoryPromise:
        """What the engine takes by this plan."""
        return MemoryPromise(
            weights=self.weight_bytes,
            storage=self.stored.arenas + self.stored.states,
            workspace=_PROCESS_BYTES + self.cache_limit_bytes,
            cache=(self._held_steps - 1) * self.cache_limit_bytes,
        )

    @property
    def cache_limit_bytes(self) -> int:
        """The arrays of one step: MLX keeps their buffers, so that the next step finds them all."""
        return self._step_bytes(min(self.context_tokens, self.arena_tokens))

    def needed_bytes(self, default_bytes: int) -> int:
        """What the model takes with the storage that the settings give it, or `default_bytes` for
        storage and attention if they give none. The machine's memory does not count.
        """
        if self.config.kv_cache_bytes is None:
            return self.weight_bytes + self._computing_bytes(0) + default_bytes
        unbounded = replace(self.machine, left_bytes=sys.maxsize, most_bytes=sys.maxsize)
        return replace(self, machine=unbounded).promise.total

    @property
    def _held_steps(self) -> int:
        """How many steps' arrays count. On a CPU two: MLX's buffer cache keeps those of one step
        (`cache_limit_bytes`) in addition to those in use. On a GPU it frees them before both exceed
        the memory limit (`malloc` in its `metal/allocator.cpp` and `cuda/allocator.cpp`).
        """
        return 2 if self.machine.device.startswith("cpu") else 1

    def _step_bytes(self, longest: int) -> int:
        """The arrays of a step if the longest sequence has `longest` tokens."""
        return step_bytes(self.config, self.vocab_size) + self.workspace.bytes(longest)

    def _computing_bytes(self, longest: int) -> int:
        """What is neither weights nor storage if the longest sequence has `longest` tokens."""
        return _PROCESS_BYTES + self._held_steps * self._step_bytes(longest)

    @property
    def _room_bytes(self) -> int:
        """The most for storage and computing."""
        return self.machine.most_bytes - self.weight_bytes

    @property
    def _running_bytes(self) -> int:
        """Recurrent states of all running sequences."""
        return self.config.max_running * self.footprint.state_bytes

    def _wanted(self) -> tuple[int, int]:
        """Bytes of blocks and of saved states: as configured, or what is useful within our share of
        the memory. Running states are part of neither. Saved ones get a quarter of what there is
        for KV, but at most USEFUL_STATES for each running sequence.
        """
        config, running_bytes = self.config, self._running_bytes
        left_bytes = self.machine.left_bytes - self.weight_bytes - self._computing_bytes(0)
        share_bytes = int(max(left_bytes, 0) * self.machine.kv_share)
        if running_bytes > share_bytes:
            raise ModelError(
                f"{config.max_running} running sequences take {running_bytes:,} bytes of recurrent "
                f"state, more than this machine's {share_bytes:,}: lower max_running"
            )
        kv_bytes, saved_bytes = config.kv_cache_bytes, config.state_cache_bytes
        if saved_bytes is None:
            shared_bytes = share_bytes - running_bytes if kv_bytes is None else kv_bytes
            saved_bytes = min(shared_bytes // 4, USEFUL_STATES * running_bytes)
        if not config.prefix_cache:
            saved_bytes = 0
        if kv_bytes is None:  # at most what is useful: full lengths, and all windows twice
            sequence_blocks = blocks_for(self.context_tokens, config.block_size)
            sequence_bytes = sequence_blocks * self.footprint.block_bytes
            sequence_bytes += 2 * _lease_bytes(config, self.footprint)
            most_bytes = max(share_bytes - running_bytes - saved_bytes, 0)
            kv_bytes = min(most_bytes, config.max_running * sequence_bytes)
        return kv_bytes, saved_bytes

    def _most_kv_bytes(self, room_bytes: int) -> int:
        """The largest KV cache that fits into `room_bytes` with the computing of its longest
        sequence, which is no longer than the cache.
        """
        block_bytes, block_size = self.footprint.block_bytes, self.config.block_size
        for_longest = room_bytes - self._computing_bytes(self.context_tokens)
        longest_blocks = blocks_for(self.context_tokens, block_size)
        if not block_bytes or for_longest >= longest_blocks * block_bytes:
            return for_longest

        def total_bytes(n_blocks: int) -> int:
            return n_blocks * block_bytes + self._computing_bytes(n_blocks * block_size)

        return (bisect_right(range(longest_blocks), room_bytes, key=total_bytes) - 1) * block_bytes

    def _divided(self, kv_bytes: int, saved_bytes: int) -> StorageSizes:
        """The storage that these bytes buy.

        Windows get room for every running sequence and as much again for what others left, but at
        most half the bytes if other layers keep every token.
        """
        config, footprint = self.config, self.footprint
        lease_bytes = _lease_bytes(config, footprint)
        least_bytes = least_kv_bytes(config, footprint)
        if kv_bytes < least_bytes:
            raise ModelError(
                f"a KV cache of {kv_bytes:,} bytes is too small for a block of each of the "
                f"{config.max_running} sequences that may run and the windows of one: raise "
                f"kv_cache_bytes to at least {least_bytes:,}, or lower max_running or step_tokens"
            )
        leases = 0
        if lease_bytes:
            leases = min(kv_bytes // lease_bytes, (1 + config.prefix_cache) * config.max_running)
        if footprint.block_bytes:
            if lease_bytes:
                spare_bytes = kv_bytes - config.max_running * footprint.block_bytes
                leases = max(1, min(leases, min(kv_bytes // 2, spare_bytes) // lease_bytes))
            n_blocks = (kv_bytes - leases * lease_bytes) // footprint.block_bytes
        else:
            longest_blocks = blocks_for(self.context_tokens, config.block_size)
            useful_blocks = 2 * config.max_running * longest_blocks
            n_blocks = max(min(useful_blocks, _MOST_LOGICAL_BLOCKS), longest_blocks)
        states = None
        if footprint.state_bytes:
            states = StateCounts(config.max_running, saved_bytes // footprint.state_bytes)
        windows = tuple(
            WindowSize(window, leases * lease_slots(window, config.block_size, config.step_tokens))
            for window, _ in footprint.windows
        )
        return StorageSizes(n_blocks, windows, states)

    def _bytes_of(self, sizes: StorageSizes) -> StorageBytes:
        block_bytes, state_bytes = self.footprint.block_bytes, self.footprint.state_bytes
        slots = tuple(slot_bytes for _, slot_bytes in self.footprint.windows)
        n_slots = (size.n_slots for size in sizes.windows)
        return StorageBytes(
            block=block_bytes,
            slots=slots if sizes.states is None else (*slots, state_bytes),
            arenas=sizes.n_blocks * block_bytes + sum(map(mul, n_slots, slots)),
            states=0 if sizes.states is None else sizes.states.total * state_bytes,
        )

    def _figures(self) -> str:
        """What there is and what is taken of it."""
        tokens = self.context_tokens
        return (
            f"of {_readable(self.machine.most_bytes)} of free memory the weights take "
            f"{_readable(self.weight_bytes)} and computing takes "
            f"{_readable(self._computing_bytes(0))}, {_readable(self._computing_bytes(tokens))} "
            f"with a sequence of {tokens:,} tokens"
        )

    def _too_large(self) -> ModelError:
        """The refusal, with the largest setting that fits."""
        config, running_bytes = self.config, self._running_bytes
        least_bytes = least_kv_bytes(config, self.footprint)
        spare_bytes = self._most_kv_bytes(self._room_bytes - running_bytes)
        if spare_bytes < least_bytes:
            advice = (
                f"{config.max_running} running sequences need {_readable(least_bytes)} of KV cache "
                f"and {_readable(running_bytes)} of recurrent state: lower max_running, "
                "step_tokens or block_size"
            )
        elif config.kv_cache_bytes is None:
            advice = f"at most {_settable(spare_bytes - least_bytes)} would fit"
        elif config.state_cache_bytes is not None:
            advice = f"at most {_settable(spare_bytes)} together would fit"
        else:  # saved states take a quarter of the KV cache's bytes, up to all that they can use
            most_bytes = max(spare_bytes - USEFUL_STATES * running_bytes, spare_bytes * 4 // 5)
            advice = f"at most {_settable(most_bytes)} would fit"
        settings = {
            "kv_cache_bytes": config.kv_cache_bytes,
            "state_cache_bytes": config.state_cache_bytes,
        }
        given = (f"{name} of {_readable(n)}" for name, n in settings.items() if n is not None)
        wanted = " with ".join(given) or "the least KV cache"
        return ModelError(f"{wanted} does not fit: {self._figures()}; {advice}")


def _readable(n_bytes: int) -> str:
    n_bytes = max(n_bytes, 0)
    return f"{n_bytes / 2**30:.1f} GiB" if n_bytes >= 1 << 30 else f"{n_bytes / 2**20:.0f} MiB"


def _settable(n_bytes: int) -> str:
    """A little less, as a setting can be written: free memory is not the same from day to day."""
    for step_mib in (1024, 100, 10, 1):
        steps = n_bytes // (step_mib << 20)
        if steps >= 10:
            return f"{steps}GiB" if step_mib == 1024 else f"{steps * step_mib}MiB"
    return f"{n_bytes >> 10}KiB"


QUIET_SECONDS = 600.0
"""Between one warning and the next."""


class MeteredRunner:
    """A runner whose steps' memory is measured, and compared with what was promised."""

    def __init__(
        self,
        runner: ModelRunner,
        promise: MemoryPromise,
        used_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`used_bytes`: what MLX had given out before the model was loaded."""
        self._runner, self._promise, self._used_bytes = runner, promise, used_bytes
        self._clock = clock
        self._peak = 0
        self._warned: float | None = None  # when, by the clock
        mx.reset_peak_memory()

    def submit(self, plan: StepPlan) -> None:
        self._runner.submit(plan)

    def sample(self, masks: Callable[[], StepMasks] | None) -> None:
        self._runner.sample(masks)

    def collect(self) -> StepResult:
        try:
            return self._runner.collect()
        finally:
            self._measure()

    def stats(self) -> MemoryStats:
        """The memory now. Any thread may call it."""
        return MemoryStats(
            active=mx.get_active_memory() - self._used_bytes,
            cached=mx.get_cache_memory(),
            peak=max(self._peak, mx.get_peak_memory()) - self._used_bytes,
            resident=process_bytes(),
            promise=self._promise,
        )

    def _measure(self) -> None:
        """Take the peak of the step that has been computed. Warns if it was above the promise."""
        peak = mx.get_peak_memory()
        mx.reset_peak_memory()
        self._peak = max(self._peak, peak)
        taken, promised = peak - self._used_bytes - self._promise.kept, self._promise.workspace
        now = self._clock()
        if taken > promised and (self._warned is None or now >= self._warned + QUIET_SECONDS):
            self._warned = now
            line = "a step took %.0f MiB on top of weights and KV cache; %.0f MiB were promised"
            logger.warning(line, taken / 2**20, promised / 2**20)
