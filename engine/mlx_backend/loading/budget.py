"""How many bytes, blocks and states everything gets. Pure functions."""

from dataclasses import dataclass

from engine.api import ModelError
from engine.values.settings import EngineConfig
from kvstore.pool import blocks_for
from kvstore.sizes import StateCounts, StorageSizes, WindowSize
from kvstore.window import lease_slots

GPU_SHARE = 0.8
CPU_SHARE = 0.1  # the machine is not ours alone, and the arena is touched at start

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
