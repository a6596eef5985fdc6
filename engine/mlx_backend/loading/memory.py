"""How an engine divides memory among weights, storage, the work of a step and the checks at load.

`MemoryPlan` computes the division from numbers, before anything is loaded. A lease is what one
sequence holds of the storage.
"""

import math
import sys
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from engine.api import ModelError
from engine.kv_events.memory import REPLAY_BYTES, published_block_bytes
from engine.mlx_backend.host import Machine, most_arrays
from engine.mlx_backend.kv.layout import Layout
from engine.mlx_backend.kv.shape import block_bytes
from engine.mlx_backend.kv.states import StateBytes
from engine.mlx_backend.loading.workspace import AttentionWorkspace
from engine.values.settings import EngineConfig, KVEventsConfig
from engine.values.stats import ArrayCounts, ModelMemory, readable_bytes
from kvstore.pool import blocks_for
from kvstore.sizes import StateCounts, StorageBytes, StorageSizes, WindowSize, checkpoint_interval
from kvstore.window import lease_slots

USEFUL_STATES = 4
"""Saved states for each sequence that may run. A conversation leaves two or three."""

_MOST_LOGICAL_BLOCKS = 1 << 16
"""Blocks of a model without layers that keep every token: they are counted, but take no memory."""

PROCESS_BYTES, _TOKEN_BYTES, _LOGIT_BYTES = 256 << 20, 64 << 10, 50
"""Upper bounds of the process's growth, and of a step's arrays for each token and each logit.

Peaks measured on a CPU: 36 MB for a prompt of 512 tokens through layers 1,024 and 4,096 wide, and
470 MB to sample 64 rows of 151,936 logits. The process grows by 110 MB between its first look at
the memory and its first answer; the remainder is for wider layers.
"""

REHEARSAL_ROWS, REHEARSAL_BLOCKS = 4, 9
"""Rows of the largest rehearsal of compiled decodes, and blocks of each row."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that a model's layers keep; 0 or None where it has none of a kind."""

    block_bytes: int  # of a block in the layers that keep every token
    windows: tuple[tuple[int, int], ...] = ()  # (window, bytes of a block in its layers)
    state: StateBytes | None = None  # of one sequence

    def storage_bytes(self, sizes: StorageSizes) -> StorageBytes:
        """The bytes of storage of these sizes."""
        slots = [slot_bytes for _, slot_bytes in self.windows]
        arenas = sizes.n_blocks * self.block_bytes
        for window, slot_bytes in zip(sizes.windows, slots, strict=True):
            arenas += window.n_slots * slot_bytes
        states = 0
        if sizes.states is not None and self.state is not None:
            slots.append(self.state.saved)
            states = self.state.total(sizes.states)
        return StorageBytes(self.block_bytes, tuple(slots), arenas, states)


def footprint(layout: Layout, block_size: int) -> Footprint:
    """The footprint of a model with blocks of `block_size` tokens."""
    return Footprint(
        block_bytes(layout.full_layers, block_size),
        tuple(
            (window, block_bytes(layout.layers_of(window), block_size)) for window in layout.windows
        ),
        layout.state_bytes,
    )


def least_kv_bytes(config: EngineConfig, footprint: Footprint) -> int:
    """The smallest KV cache: one block for each running sequence, and the windows of one lease."""
    return config.max_running * footprint.block_bytes + _lease_bytes(config, footprint)


def _lease_bytes(config: EngineConfig, footprint: Footprint) -> int:
    """Bytes of the windows of one lease."""
    return sum(
        lease_slots(window, config.block_size, config.step_tokens) * block_bytes
        for window, block_bytes in footprint.windows
    )


def rehearsal_sizes(windows: Sequence[int], is_recurrent: bool) -> StorageSizes:
    """The storage that compiled decodes are rehearsed over, before one is chosen to serve."""
    n_blocks = REHEARSAL_ROWS * REHEARSAL_BLOCKS
    return StorageSizes(
        n_blocks,
        tuple(WindowSize(window, n_blocks) for window in windows),
        StateCounts(REHEARSAL_ROWS, REHEARSAL_ROWS) if is_recurrent else None,
    )


def activation_bytes(
    n_tokens: int, n_rows: int, vocab_size: int, token_bytes: int = _TOKEN_BYTES
) -> int:
    """The arrays of a step that computes `n_tokens` tokens of `token_bytes` each and samples
    `n_rows` rows, without weights, storage, recurrent states and attention's workspace.
    """
    return n_tokens * token_bytes + n_rows * vocab_size * _LOGIT_BYTES


class AgreedSizes(NamedTuple):
    """What all ranks of a model have memory for: see the properties of `MemoryPlan`."""

    sizes: StorageSizes
    most_keys: float


@dataclass(frozen=True)
class MemoryPlan:
    """An engine's memory: what is kept, what steps and the checks at load take, and the limits of
    MLX's allocator.

    The fields are the input. Everything else raises ModelError if the settings do not fit, or are
    too small to serve with; its message has the figures and the largest setting that would fit.
    """

    config: EngineConfig
    machine: Machine  # before the weights are loaded
    weight_bytes: int
    footprint: Footprint
    workspace: AttentionWorkspace
    vocab_size: int
    context_tokens: int  # of the longest sequence that the model can have
    check_bytes: int = 0  # of the check at load, which ends before storage is allocated
    token_bytes: int = 0  # of a step for each token, as measured; 0: it has not been
    image_bytes: int = 0  # of images' features, and of the tower's arrays while it encodes one
    agreed: AgreedSizes | None = None  # with the other ranks of the model

    def fitting(self) -> "MemoryPlan":
        """This plan with the longest context that fits, in whole blocks: its own where that fits,
        and where none does, which `sizes` then explains.
        """
        block_size = self.config.block_size

        def does_not_fit(n_blocks: int) -> bool:
            try:
                _ = replace(self, context_tokens=n_blocks * block_size).sizes
            except ModelError:
                return True
            return False

        n_blocks = blocks_for(self.context_tokens, block_size)
        try:
            _ = self.sizes
        except ModelError:
            n_blocks = bisect_right(range(1, n_blocks), False, key=does_not_fit)
        else:
            return self
        return replace(self, context_tokens=n_blocks * block_size) if n_blocks else self

    @cached_property
    def sizes(self) -> StorageSizes:
        """How much storage of each kind there is."""
        if self.agreed is not None:
            return self.agreed.sizes
        if self._room_bytes < max(self._computing_bytes(0), self.check_bytes):
            raise ModelError(self._does_not_fit())
        kv_bytes, saved_bytes = self._wanted()
        room_bytes = self._room_bytes - self._running_bytes
        if self.footprint.state is not None:
            room_bytes -= saved_bytes
        most_kv_bytes = self._most_kv_bytes(room_bytes)
        if most_kv_bytes < least_kv_bytes(self.config, self.footprint):
            raise self._too_large()
        if self.config.kv_cache_bytes is None:
            kv_bytes = min(kv_bytes, most_kv_bytes)
        sizes = self._divided(kv_bytes, saved_bytes)
        if self.footprint.storage_bytes(sizes).arenas > most_kv_bytes:
            raise self._too_large()
        return sizes

    @cached_property
    def stored(self) -> StorageBytes:
        """The bytes of the storage."""
        return self.footprint.storage_bytes(self.sizes)

    @property
    def arena_tokens(self) -> int:
        return self.sizes.n_blocks * self.config.block_size

    @property
    def most_keys(self) -> float:
        """The keys that a forward of several rows may read; no limit if no layer keeps every token,
        because a row gathers few keys then: those of its windows.
        """
        if self.agreed is not None:
            return self.agreed.most_keys
        longest = min(self.context_tokens, self.arena_tokens)
        return self.workspace.forward_keys(longest) if self.footprint.block_bytes else math.inf

    def array_counts(self, n_weights: int, layout: Layout) -> ArrayCounts | None:
        """The arrays that stay between steps, `n_weights` of weights among them; None where the
        device does not state how many it allows.
        """
        most, states = most_arrays(), self.sizes.states
        return (
            ArrayCounts(
                fixed=n_weights + layout.n_planes,
                of_state=len(layout.states),
                states=0 if states is None else states.total,
                state_tokens=checkpoint_interval(self.config.block_size),
                most=most,
            )
            if most
            else None
        )

    @property
    def memory(self) -> ModelMemory:
        """What the engine takes by this plan."""
        longest = min(self.context_tokens, self.arena_tokens)
        return self._memory(self.stored.arenas, self.stored.states, longest)

    def _memory(self, kv_bytes: int, states_bytes: int, longest: int) -> ModelMemory:
        """What the engine takes with this storage and sequences of at most `longest` tokens."""
        parts = self.weight_bytes, kv_bytes, states_bytes, self._computing_bytes(longest)
        events_bytes = self._replay_bytes
        if block_bytes := self.footprint.block_bytes:
            events_bytes += kv_bytes // block_bytes * self._published_block_bytes
        total_bytes = sum(parts) + events_bytes
        return ModelMemory(*parts, 0, total_bytes, events_bytes)

    @property
    def step_bytes(self) -> int:
        """What a step may take in addition to weights and storage, as MLX counts it, or the
        rehearsal of compiled decodes if that takes more. The growth of the process counts.
        """
        step_bytes = max(self.cache_limit_bytes, self.rehearsal_bytes)
        return PROCESS_BYTES + step_bytes + self.image_bytes

    @property
    def cache_limit_bytes(self) -> int:
        """The arrays of one step: MLX keeps their buffers, so that the next step finds them all."""
        return self._step_bytes(min(self.context_tokens, self.arena_tokens))

    @cached_property
    def rehearsal_bytes(self) -> int:
        """What rehearsing compiled decodes takes in addition to weights and storage; 0 if decodes
        are eager by the settings.

        The rehearsal's storage counts twice, because the random numbers that fill it are made in
        float32, for one layer's K or V at a time.
        """
        if self.config.decode == "eager":
            return 0
        windows = [window for window, _ in self.footprint.windows]
        sizes = rehearsal_sizes(windows, self.footprint.state is not None)
        stored, state = self.footprint.storage_bytes(sizes), self.footprint.state
        rows = REHEARSAL_ROWS
        workspace = replace(self.workspace, rows=rows, tokens=rows, in_place_tokens=rows)
        return (
            2 * (stored.arenas + stored.states)
            + (0 if state is None else REHEARSAL_ROWS * state.replaced)
            + workspace.bytes(REHEARSAL_BLOCKS * self.config.block_size)
            + activation_bytes(REHEARSAL_ROWS, REHEARSAL_ROWS, self.vocab_size)
        )

    def needed(self, default_bytes: int) -> ModelMemory:
        """What the model takes with the storage that the settings give it, or `default_bytes` for
        storage and attention if they give none. The machine's memory does not count.
        """
        if self.config.kv_cache_bytes is None:
            return self._memory(default_bytes, 0, 0)
        unbounded = replace(self.machine, left_bytes=sys.maxsize, most_bytes=sys.maxsize)
        return replace(self, machine=unbounded).memory

    @property
    def _held_steps(self) -> int:
        """How many steps' arrays count. On a CPU two: MLX's buffer cache keeps those of one step
        (`cache_limit_bytes`) in addition to those in use. On a GPU one: MLX empties the cache
        before both exceed the memory limit (`malloc` in its `metal/allocator.cpp` and
        `cuda/allocator.cpp`).
        """
        return 2 if self.machine.device.startswith("cpu") else 1

    def _step_bytes(self, longest: int) -> int:
        """The arrays of a step if the longest sequence has `longest` tokens."""
        config, state = self.config, self.footprint.state
        activations = activation_bytes(
            config.step_tokens,
            config.max_running,
            self.vocab_size,
            max(self.token_bytes, _TOKEN_BYTES),
        )
        states = 0 if state is None else config.max_running * state.replaced
        return activations + states + self.workspace.bytes(longest)

    def _computing_bytes(self, longest: int) -> int:
        """What is neither weights nor storage if the longest sequence has `longest` tokens."""
        step_bytes = self._step_bytes(longest)
        cached_bytes = (self._held_steps - 1) * step_bytes
        taken_bytes = max(step_bytes, self.rehearsal_bytes) + cached_bytes
        return PROCESS_BYTES + taken_bytes + self.image_bytes

    @property
    def _room_bytes(self) -> int:
        """The most for storage, computing and published blocks."""
        return self.machine.most_bytes - self.weight_bytes - self._replay_bytes

    @property
    def _replay_bytes(self) -> int:
        """The most of what is kept of KV events, apart from published blocks."""
        events = self._events
        return REPLAY_BYTES if events is not None and events.replay_endpoint else 0

    @property
    def _published_block_bytes(self) -> int:
        """What a block takes where KV events are published, in addition to its storage."""
        return 0 if self._events is None else published_block_bytes(self.config.block_size)

    @cached_property
    def _events(self) -> KVEventsConfig | None:
        """How KV events are published; None if they are not."""
        return self.config.kv_events_config if self.config.prefix_cache else None

    @property
    def _running_bytes(self) -> int:
        """Recurrent states of all running sequences."""
        state = self.footprint.state
        return 0 if state is None else self.config.max_running * state.running

    @property
    def _useful_saved_bytes(self) -> int:
        """USEFUL_STATES for each running sequence."""
        state = self.footprint.state
        return 0 if state is None else USEFUL_STATES * self.config.max_running * state.saved

    def _wanted(self) -> tuple[int, int]:
        """Bytes of the KV cache and of saved states: as configured, or what is useful within our
        share of the memory. Neither contains running states. Saved states get a quarter of the
        bytes for KV, but no more than are useful.
        """
        config, running_bytes = self.config, self._running_bytes
        taken_bytes = self.weight_bytes + self._replay_bytes + self._computing_bytes(0)
        left_bytes = self.machine.left_bytes - taken_bytes
        share_bytes = int(max(left_bytes, 0) * self.machine.kv_share)
        if running_bytes > share_bytes:
            raise ModelError(
                f"{config.max_running} running sequences take {running_bytes:,} bytes of recurrent "
                f"state, more than this machine's {share_bytes:,}: lower max_running"
            )
        kv_bytes, saved_bytes = config.kv_cache_bytes, config.state_cache_bytes
        if saved_bytes is None:
            shared_bytes = share_bytes - running_bytes if kv_bytes is None else kv_bytes
            saved_bytes = min(shared_bytes // 4, self._useful_saved_bytes)
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
        """The largest KV cache that fits into `room_bytes` together with computing its longest
        sequence, which is no longer than the cache.
        """
        block_bytes, block_size = self.footprint.block_bytes, self.config.block_size
        taken_bytes = block_bytes + self._published_block_bytes
        for_longest = room_bytes - self._computing_bytes(self.context_tokens)
        longest_blocks = blocks_for(self.context_tokens, block_size)
        if not block_bytes:
            return for_longest
        if for_longest >= longest_blocks * taken_bytes:
            return for_longest * block_bytes // taken_bytes

        def total_bytes(n_blocks: int) -> int:
            return n_blocks * taken_bytes + self._computing_bytes(n_blocks * block_size)

        return (bisect_right(range(longest_blocks), room_bytes, key=total_bytes) - 1) * block_bytes

    def _divided(self, kv_bytes: int, saved_bytes: int) -> StorageSizes:
        """Divide these bytes among blocks, windows and states.

        Windows get room for every running sequence and as much again for cached ones, but at most
        half of the bytes if other layers keep every token. Raises ModelError for too small a cache.
        """
        config, footprint = self.config, self.footprint
        lease_bytes = _lease_bytes(config, footprint)
        least_bytes = least_kv_bytes(config, footprint)
        if kv_bytes < least_bytes:
            raise ModelError(
                f"a KV cache of {kv_bytes:,} bytes is too small: {config.max_running} running "
                f"sequences need at least {least_bytes:,}; raise kv_cache_bytes, or lower "
                "max_running or step_tokens"
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
        if (state := footprint.state) is not None:
            interval = checkpoint_interval(config.block_size) if state.are_rounded else None
            states = StateCounts(config.max_running, saved_bytes // state.saved, interval)
        windows = tuple(
            WindowSize(window, leases * lease_slots(window, config.block_size, config.step_tokens))
            for window, _ in footprint.windows
        )
        return StorageSizes(n_blocks, windows, states)

    @property
    def _is_budgeted(self) -> bool:
        """Whether a setting, rather than the machine, limits the memory."""
        return self.config.memory_bytes == self.machine.most_bytes

    def _does_not_fit(self) -> str:
        """The message for a model that does not fit with the least KV cache, with its parts."""
        kv_bytes = least_kv_bytes(self.config, self.footprint)
        longest = min(self.context_tokens, self.config.max_running * self.config.block_size)
        least = self._memory(kv_bytes, self._running_bytes, longest)
        needed_bytes = max(least.total_bytes, self.weight_bytes + self.check_bytes)
        most = readable_bytes(self.machine.most_bytes)
        there_is, advice = f"{most} of memory is free", "serve a smaller model"
        if self._is_budgeted:
            there_is, advice = f"memory_budget leaves it {most}", "raise memory_budget"
        what = "the model does not fit: it needs"
        if self.config.draft_model_in_use is not None:
            what = "the model and its draft model do not fit: they need"
            advice = f"{advice}, leave out draft_model"
        return (
            f"{what} at least {readable_bytes(needed_bytes)} "
            f"({least.words}), and {there_is}: {advice}, or lower max_running or step_tokens"
        )

    def _figures(self) -> str:
        """The free memory and what is taken of it, for a message."""
        tokens = self.context_tokens
        least, most = (
            max(self._computing_bytes(longest), self.check_bytes) for longest in (0, tokens)
        )
        whose = "memory_budget" if self._is_budgeted else "free memory"
        events = ""
        if self._published_block_bytes:
            events = f", KV events {readable_bytes(self._replay_bytes)} and for each block "
            events += f"{self._published_block_bytes} bytes,"
        return (
            f"of {readable_bytes(self.machine.most_bytes)} of {whose} the weights take "
            f"{readable_bytes(self.weight_bytes)}{events} and computing takes "
            f"{readable_bytes(least)}, "
            f"{readable_bytes(most)} with a sequence of {tokens:,} tokens"
        )

    def _too_large(self) -> ModelError:
        """The error for settings that do not fit, with the largest setting that does."""
        config, running_bytes = self.config, self._running_bytes
        least_bytes = least_kv_bytes(config, self.footprint)
        spare_bytes = self._most_kv_bytes(self._room_bytes - running_bytes)
        if spare_bytes < least_bytes:
            advice = (
                f"{config.max_running} running sequences need {readable_bytes(least_bytes)} of KV "
                f"cache and {readable_bytes(running_bytes)} of recurrent state: lower max_running, "
                "step_tokens or block_size"
            )
        elif config.kv_cache_bytes is None:
            advice = f"at most {_settable(spare_bytes - least_bytes)} would fit"
        elif config.state_cache_bytes is not None:
            advice = f"at most {_settable(spare_bytes)} together would fit"
        else:  # saved states take a quarter of the KV cache's bytes, up to all that they can use
            most_bytes = max(spare_bytes - self._useful_saved_bytes, spare_bytes * 4 // 5)
            advice = f"at most {_settable(most_bytes)} would fit"
        settings = {
            "kv_cache_bytes": config.kv_cache_bytes,
            "state_cache_bytes": config.state_cache_bytes,
        }
        given = (f"{name} of {readable_bytes(n)}" for name, n in settings.items() if n is not None)
        wanted = " with ".join(given) or "the least KV cache"
        return ModelError(f"{wanted} does not fit: {self._figures()}; {advice}")


def _settable(n_bytes: int) -> str:
    """A round size, at most `n_bytes`, as a setting is written: free memory varies by the day."""
    for step_mib in (1024, 100, 10, 1):
        steps = n_bytes // (step_mib << 20)
        if steps >= 10:
            return f"{steps}GiB" if step_mib == 1024 else f"{steps * step_mib}MiB"
    return f"{n_bytes >> 10}KiB"
