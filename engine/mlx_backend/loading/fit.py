"""Whether weights, storage and the work of a step fit into memory. Pure functions."""

from bisect import bisect_right
from dataclasses import dataclass, replace

from engine.api import ModelError
from engine.mlx_backend.loading.budget import (
    USEFUL_STATES,
    Footprint,
    divide,
    find_budget,
    least_kv_bytes,
)
from engine.mlx_backend.loading.workspace import Workspace
from engine.values.settings import EngineConfig
from kvstore.pool import blocks_for
from kvstore.sizes import StorageBytes, StorageSizes


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
