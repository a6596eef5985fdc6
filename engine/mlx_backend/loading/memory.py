"""How many bytes, blocks and states everything gets. Pure functions."""

import logging
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace

import mlx.core as mx

from engine.api import ModelError
from engine.core.step import ModelRunner, StepMasks, StepPlan, StepResult
from engine.mlx_backend.attention.strategy import Attention
from engine.mlx_backend.host import Machine, process_bytes
from engine.mlx_backend.model.forward_batch import FORWARD_TOKENS
from engine.mlx_backend.model.layout import Layout
from engine.values.settings import EngineConfig
from engine.values.stats import MemoryPromise, MemoryStats
from kvstore.pool import blocks_for
from kvstore.sizes import StateCounts, StorageBytes, StorageSizes, WindowSize
from kvstore.window import lease_slots

USEFUL_STATES = 4
"""Saved states for each sequence that may run: a conversation leaves two or three behind."""

MOST_LOGICAL_BLOCKS = 1 << 16
"""Where no layer keeps every token, blocks are only counted; so many are enough to count."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a model keeps: bytes of a block in the layers that keep every token, of a block in those
    of each window, and of one sequence's recurrent state. 0 where it has no such layers."""

    block_bytes: int
    windows: tuple[tuple[int, int], ...] = ()  # (window, bytes of a block)
    state_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes for blocks of all kinds, and for saved states."""

    kv_bytes: int
    saved_bytes: int


def find_budget(
    config: EngineConfig, footprint: Footprint, max_context_tokens: int, shared_bytes: int
) -> Budget:
    """What is configured, or what is useful within `shared_bytes`, our share of the machine.

    Running states are not part of either: they are taken off the share first. Saved ones get a
    quarter of what there is for KV, but no more than USEFUL_STATES for each running sequence.

    Raises ModelError when the running states alone take more than the share.
    """
    running_bytes = config.max_running * footprint.state_bytes
    if running_bytes > max(shared_bytes, 0):
        raise ModelError(
            f"{config.max_running} running sequences take {running_bytes:,} bytes of recurrent "
            f"state, more than this machine's {max(shared_bytes, 0):,}: lower max_running"
        )
    for_kv = config.kv_cache_bytes
    left_bytes = max(shared_bytes, 0) - running_bytes if for_kv is None else for_kv
    saved_bytes = config.state_cache_bytes
    if saved_bytes is None:
        saved_bytes = min(left_bytes // 4, USEFUL_STATES * running_bytes)
    if not config.prefix_cache:
        saved_bytes = 0
    if for_kv is None:
        useful_bytes = _useful_kv_bytes(config, footprint, max_context_tokens)
        for_kv = min(max(left_bytes - saved_bytes, 0), useful_bytes)
    return Budget(for_kv, saved_bytes)


def divide(
    config: EngineConfig, footprint: Footprint, max_context_tokens: int, budget: Budget
) -> StorageSizes:
    """What a budget buys.

    Windows get room for every running sequence and as much again for what others left, but no
    more than half where other layers keep every token. Raises ModelError when it does not buy a
    block for each running sequence and the windows of one.
    """
    lease_bytes = _lease_bytes(config, footprint)
    needed_bytes = least_kv_bytes(config, footprint)
    if budget.kv_bytes < needed_bytes:
        raise ModelError(
            f"a KV cache of {budget.kv_bytes:,} bytes is too small for a block of each of the "
            f"{config.max_running} sequences that may run and the windows of one: raise "
            f"kv_cache_bytes to at least {needed_bytes:,}, or lower max_running or step_tokens"
        )
    leases = _window_leases(config, footprint, budget.kv_bytes)
    if footprint.block_bytes:
        n_blocks = (budget.kv_bytes - leases * lease_bytes) // footprint.block_bytes
    else:
        n_blocks = _logical_blocks(config, max_context_tokens)
    states = None
    if footprint.state_bytes:
        states = StateCounts(config.max_running, budget.saved_bytes // footprint.state_bytes)
    windows = tuple(
        WindowSize(window, leases * lease_slots(window, config.block_size, config.step_tokens))
        for window, _ in footprint.windows
    )
    return StorageSizes(n_blocks, windows, states)


def least_kv_bytes(config: EngineConfig, footprint: Footprint) -> int:
    """A block for each running sequence and the windows of one."""
    return config.max_running * footprint.block_bytes + _lease_bytes(config, footprint)


def _window_leases(config: EngineConfig, footprint: Footprint, kv_bytes: int) -> int:
    """The windows of how many leases there is room for, at least one."""
    lease_bytes = _lease_bytes(config, footprint)
    if lease_bytes == 0:
        return 0
    most = config.max_running * (2 if config.prefix_cache else 1)
    if not footprint.block_bytes:
        return min(kv_bytes // lease_bytes, most)
    beside_blocks = kv_bytes - config.max_running * footprint.block_bytes
    return max(1, min(kv_bytes // 2 // lease_bytes, beside_blocks // lease_bytes, most))


def _useful_kv_bytes(config: EngineConfig, footprint: Footprint, max_context_tokens: int) -> int:
    """Every running sequence at full length, and twice the windows of all."""
    blocks = config.max_running * blocks_for(max_context_tokens, config.block_size)
    windows_bytes = 2 * config.max_running * _lease_bytes(config, footprint)
    return blocks * footprint.block_bytes + windows_bytes


def _logical_blocks(config: EngineConfig, max_context_tokens: int) -> int:
    """Every running sequence at full length, and as much again for what others left."""
    sequence_blocks = blocks_for(max_context_tokens, config.block_size)
    useful_blocks = 2 * config.max_running * sequence_blocks
    return max(min(useful_blocks, MOST_LOGICAL_BLOCKS), sequence_blocks)


def _lease_bytes(config: EngineConfig, footprint: Footprint) -> int:
    """Bytes of one lease's windows."""
    return sum(
        lease_slots(window, config.block_size, config.step_tokens) * block_bytes
        for window, block_bytes in footprint.windows
    )


GATHERED_BYTES = 1 << 30
"""K and V that one forward may gather in one layer, unless a single row needs more.

A forward with more is split, which reads the weights once more. That is little beside the gather,
which reads, writes and reads again so much: a layer of 8 G parameters in 32 layers has half of it.
"""

_SCORE_BYTES = 4
_MASK_BYTES = 1

FUSED_DIMS = (64, 80, 128)
"""Dimensions of heads for which Metal's attention keeps no scores (MLX,
`backend/metal/scaled_dot_product_attention.cpp`)."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """What the size of the workspace depends on. A key is a token's K and V in one layer."""

    rows: int  # in one forward
    tokens: int  # in one forward, padding included
    key_bytes: int  # of one key in the layer where it takes most
    copies: int  # of all keys of a forward
    heads: int  # whose scores are kept for all tokens and keys at once; 0 where they are fused
    held_steps: int = 1  # see `allocator.held_steps`

    def forward_keys(self, longest: int) -> int:
        """The most keys that a forward reads, rows x those of its longest row.

        `longest`: tokens of the longest sequence that there can be.
        """
        affordable = GATHERED_BYTES // max(self.key_bytes, 1)
        return min(self.rows * longest, max(longest, affordable))

    def bytes(self, longest: int) -> int:
        """K and V gathered for a forward, and the mask and scores of its tokens, at most; this for
        each of the `held_steps`.

        Scores count once: softmax and mask write where they read. Tiles do not make it less,
        because MLX computes the scores of many before it attends to the first.
        """
        gathered = self.copies * self.forward_keys(longest) * self.key_bytes
        scores = self.tokens * longest * (self.heads * _SCORE_BYTES + _MASK_BYTES)
        return self.held_steps * (gathered + scores)


def find_workspace(
    config: EngineConfig, layout: Layout, query_heads: int, attention: Attention, *, is_metal: bool
) -> Workspace:
    """Of a model whose layers have at most so many heads of queries."""
    layers = layout.kv_layers
    is_fused = is_metal and all(
        shape.key_dim == shape.value_dim and shape.key_dim in FUSED_DIMS for shape in layers
    )
    return Workspace(
        rows=config.max_running,
        tokens=config.step_tokens + FORWARD_TOKENS * config.max_running if layers else 0,
        key_bytes=max((shape.token_bytes for shape in layers), default=0),
        copies=attention.gathered_copies,
        heads=0 if is_fused else query_heads,
    )


_PROCESS_BYTES = 256 << 20
_TOKEN_BYTES = 64 << 10
_LOGIT_BYTES = 48
"""What a step takes at most, from peaks measured on a CPU: 36 MB for a prompt of 512 tokens through
layers 1,024 and 4,096 wide, 400 MB to sample 64 rows of 151,936 logits. The process itself grows by
110 MB between its first look at the memory and its first answer; the rest is for wider layers."""


def working_bytes(config: EngineConfig, vocab_size: int, held_steps: int = 1) -> int:
    """What the process and a step take in addition to weights, storage and attention's workspace.

    `held_steps`: see `allocator.held_steps`.
    """
    return _PROCESS_BYTES + held_steps * step_bytes(config, vocab_size)


def step_bytes(config: EngineConfig, vocab_size: int) -> int:
    """The arrays of a step in addition to weights, storage and attention's workspace."""
    logits = config.max_running * vocab_size
    return config.step_tokens * _TOKEN_BYTES + logits * _LOGIT_BYTES


@dataclass(frozen=True, slots=True)
class Room:
    """The memory for all of it, as it is before the weights are loaded. Bytes."""

    left: int  # not in use
    most: int  # what we can have if told to take it
    weights: int
    working: int  # what a step takes, but for what grows with the longest sequence
    workspace: Workspace  # and that
    share: float  # of what is left beside both, what storage takes if not told

    @property
    def default(self) -> int:
        """What storage takes where no setting says how much."""
        return int(max(self.left - self.weights - self.working, 0) * self.share)

    @property
    def storage(self) -> int:
        """What storage can take; negative where not even the model fits."""
        return self.most - self.weights - self.working

    def most_kv_bytes(
        self, storage_bytes: int, config: EngineConfig, block_bytes: int, max_context_tokens: int
    ) -> int:
        """The largest KV cache within `storage_bytes`, beside what its longest sequence takes.

        No sequence is longer than the cache, so a small one needs little workspace.
        """
        beside_all = storage_bytes - self.workspace.bytes(max_context_tokens)
        longest_blocks = blocks_for(max_context_tokens, config.block_size)
        if not block_bytes or beside_all >= longest_blocks * block_bytes:
            return beside_all

        def total_bytes(n_blocks: int) -> int:
            return n_blocks * block_bytes + self.workspace.bytes(n_blocks * config.block_size)

        n_blocks = bisect_right(range(longest_blocks), storage_bytes, key=total_bytes) - 1
        return n_blocks * block_bytes

    def in_words(self, max_context_tokens: int) -> str:
        """What there is and what is taken of it, for people."""
        longest_bytes = self.working + self.workspace.bytes(max_context_tokens)
        return (
            f"of {_readable(self.most)} of free memory the weights take {_readable(self.weights)}"
            f" and computing takes {_readable(self.working)}, {_readable(longest_bytes)} with a "
            f"sequence of {max_context_tokens:,} tokens"
        )


def fit(
    config: EngineConfig, footprint: Footprint, max_context_tokens: int, room: Room
) -> StorageSizes:
    """How much storage of each kind there will be.

    Raises ModelError, with the figures and what would fit, when it is more than there is room for,
    and when it is too little to serve with.
    """
    if room.storage < 0:
        raise ModelError(f"the model does not fit: {room.in_words(max_context_tokens)}")
    budget = find_budget(config, footprint, max_context_tokens, room.default)
    beside_states = room.storage - config.max_running * footprint.state_bytes
    if footprint.state_bytes:
        beside_states -= budget.saved_bytes
    for_kv = room.most_kv_bytes(beside_states, config, footprint.block_bytes, max_context_tokens)
    if for_kv < least_kv_bytes(config, footprint):
        raise _too_large(config, footprint, max_context_tokens, room)
    if config.kv_cache_bytes is None:
        budget = replace(budget, kv_bytes=min(budget.kv_bytes, for_kv))
    sizes = divide(config, footprint, max_context_tokens, budget)
    if storage_bytes(footprint, sizes).arenas > for_kv:
        raise _too_large(config, footprint, max_context_tokens, room)
    return sizes


def storage_bytes(footprint: Footprint, sizes: StorageSizes) -> StorageBytes:
    """The bytes that storage of these sizes takes."""
    windows = tuple(slot_bytes for _, slot_bytes in footprint.windows)
    windows_bytes = sum(
        size.n_slots * slot_bytes for size, slot_bytes in zip(sizes.windows, windows, strict=True)
    )
    return StorageBytes(
        block=footprint.block_bytes,
        slots=windows if sizes.states is None else (*windows, footprint.state_bytes),
        arenas=sizes.n_blocks * footprint.block_bytes + windows_bytes,
        states=0 if sizes.states is None else sizes.states.total * footprint.state_bytes,
    )


def _too_large(
    config: EngineConfig, footprint: Footprint, max_context_tokens: int, room: Room
) -> ModelError:
    advice = _advice(config, footprint, max_context_tokens, room)
    found = room.in_words(max_context_tokens)
    return ModelError(f"{_asked(config)} does not fit: {found}; {advice}")


def _asked(config: EngineConfig) -> str:
    given = {
        "kv_cache_bytes": config.kv_cache_bytes,
        "state_cache_bytes": config.state_cache_bytes,
    }
    told = (f"{name} of {_readable(n)}" for name, n in given.items() if n is not None)
    return " with ".join(told) or "the least KV cache"


def _advice(config: EngineConfig, footprint: Footprint, max_context_tokens: int, room: Room) -> str:
    """The largest setting that fits."""
    least_bytes = least_kv_bytes(config, footprint)
    running_bytes = config.max_running * footprint.state_bytes
    spare_bytes = room.most_kv_bytes(
        room.storage - running_bytes, config, footprint.block_bytes, max_context_tokens
    )
    if spare_bytes < least_bytes:
        return (
            f"{config.max_running} running sequences need {_readable(least_bytes)} of KV cache and "
            f"{_readable(running_bytes)} of recurrent state: lower max_running, step_tokens or "
            "block_size"
        )
    if config.kv_cache_bytes is None:
        return f"at most {_settable(spare_bytes - least_bytes)} would fit"
    if config.state_cache_bytes is not None:
        return f"at most {_settable(spare_bytes)} together would fit"
    # Saved states take a quarter of it beside it, until they have all they can use.
    most_bytes = max(spare_bytes - USEFUL_STATES * running_bytes, spare_bytes * 4 // 5)
    return f"at most {_settable(most_bytes)} would fit"


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


@dataclass(frozen=True, slots=True)
class AllocatorLimits:
    """Bytes. Both are wishes to MLX: it never refuses memory because of them.

    Beyond `memory` it waits for what has been launched to give its buffers back, and on GPUs first
    gives up buffers that it keeps. `cache` is what it keeps of buffers that nobody uses.
    """

    memory: int
    cache: int


def held_steps(host: Machine) -> int:
    """How many steps' arrays count in the memory plan: that of the step being computed, and that of
    MLX's buffer cache, which keeps as many bytes at most (`AllocatorLimits.cache`).

    On a GPU the cache does not count in addition: MLX frees cached buffers before those in use and
    those cached exceed the memory limit together (`malloc` in MLX's `metal/allocator.cpp` and
    `cuda/allocator.cpp`). So they fit into what the plan has for a step. On a CPU it frees none.
    """
    return 2 if host.device.startswith("cpu") else 1


def allocator_limits(host: Machine, used_bytes: int, step_bytes: int) -> AllocatorLimits:
    """For what a machine had left when MLX used `used_bytes`, and the arrays of a step take
    `step_bytes`.

    Memory: what we use and what we can have. MLX's own limit knows of no others: 95% of a CUDA
    device, 1.5 times Metal's working set, four fifths of the machine's memory and not of the
    container's on a CPU; and once weights and arena alone are above it, each operation waits for
    the one before.

    Cache: the buffers of one step, so that the next finds them all. MLX's own limit on GPUs is that
    of memory: buffers of every size that was ever needed would stay.
    """
    return AllocatorLimits(used_bytes + host.most_bytes, step_bytes)


def limit_allocator(limits: AllocatorLimits) -> None:
    """Tell MLX, for the whole process.

    On a CPU its own cache of 32 MiB is less than sampling with a large vocabulary takes in one
    step, and memory that the system has taken back costs a page fault for each 4 KiB: the
    log-probabilities of 16 rows of 151,936 tokens took 18 ms in place of 10.
    """
    mx.set_memory_limit(limits.memory)
    mx.set_cache_limit(limits.cache)


logger = logging.getLogger(__name__)

QUIET_SECONDS = 600.0
"""Between one warning and the next."""


class MemoryMeter:
    """Begins when the model has been loaded. `stats` may be asked by any thread."""

    def __init__(self, promise: MemoryPromise, used_bytes: int, clock: Callable[[], float]) -> None:
        """`used_bytes`: what MLX had given out before the model."""
        self._promise = promise
        self._used_bytes = used_bytes
        self._clock = clock
        self._peak = 0
        self._warned: float | None = None  # when, by the clock
        mx.reset_peak_memory()

    def stats(self) -> MemoryStats:
        return MemoryStats(
            active=mx.get_active_memory() - self._used_bytes,
            cached=mx.get_cache_memory(),
            peak=max(self._peak, mx.get_peak_memory()) - self._used_bytes,
            resident=process_bytes(),
            promise=self._promise,
        )

    def stepped(self) -> None:
        """A step has been computed."""
        peak = mx.get_peak_memory()
        mx.reset_peak_memory()
        self._peak = max(self._peak, peak)
        taken = peak - self._used_bytes - self._promise.kept
        if taken > self._promise.workspace:
            self._warn(taken)

    def _warn(self, taken: int) -> None:
        now = self._clock()
        if self._warned is not None and now < self._warned + QUIET_SECONDS:
            return
        self._warned = now
        logger.warning(
            "a step took %.0f MiB beside weights and KV cache; %.0f MiB were promised",
            taken / 2**20,
            self._promise.workspace / 2**20,
        )


class MeteredRunner:
    """A runner whose steps' memory is measured."""

    def __init__(self, runner: ModelRunner, meter: MemoryMeter) -> None:
        self._runner = runner
        self._meter = meter

    def submit(self, plan: StepPlan) -> None:
        self._runner.submit(plan)

    def sample(self, masks: Callable[[], StepMasks] | None) -> None:
        self._runner.sample(masks)

    def collect(self) -> StepResult:
        try:
            return self._runner.collect()
        finally:
            self._meter.stepped()
