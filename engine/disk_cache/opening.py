"""Opens the configured disk cache for one model."""

import math
from collections.abc import Callable, Sequence

from engine.core.step import Backend
from engine.disk_cache.cache import DiskCache
from engine.disk_cache.load_budget import LoadLimits
from engine.disk_cache.loader import LoadRules, Post
from engine.disk_cache.writer import WriteRules
from engine.values.settings import DiskCacheConfig
from kvstore.disk.space import holding, longest_path
from kvstore.disk.store import DiskStore
from kvstore.disk.types import MIB, DiskError, DiskLimits
from kvstore.pool import blocks_for
from kvstore.store import KVStore

BUFFER_BYTES = 64 * MIB

HELD_PART, AHEAD_PART = 4, 64
"""Of the arena: what loads pin together, unless one alone is larger, and what is read for them and
not filled in yet.
"""

LEAST_AHEAD_BYTES = 16 * MIB
"""Two runs for each of two readers."""


def open_disk_cache(
    config: DiskCacheConfig,
    backend: Backend,
    store: KVStore,
    post: Post,
    report: Callable[[str], None],
) -> DiskCache:
    """Raises DiskError, in words, when the folder cannot be used, or the limit is too small."""
    rules = WriteRules(writes=config.write, salted=config.salted)
    n_tokens = kept_tokens(config.max_bytes, backend.part_bytes, store.block_size)
    if n_tokens < rules.least_tokens:
        raise DiskError(_too_small(config.max_bytes, rules, backend.part_bytes, store.block_size))
    tier = DiskStore.open(
        config.directory,
        f"{backend.card.fingerprint} {backend.kv_format} {backend.software}",
        tier_limits(config, backend.part_bytes),
        daemon=config.daemon,
    )
    kept = "prompts whole" if math.isinf(n_tokens) else f"of a prompt its first {n_tokens:,} tokens"
    report(f"disk cache: {config.directory}, at most {_mib(config.max_bytes)}, {kept}")
    return DiskCache(
        tier,
        store,
        backend.part_bytes,
        config.max_bytes,
        post,
        rules,
        LoadRules(
            salted=config.salted, limits=load_limits(store.pool.n_blocks, backend.part_bytes)
        ),
        config.shutdown_seconds,
    )


def tier_limits(config: DiskCacheConfig, part_bytes: Sequence[int]) -> DiskLimits:
    """Room for the largest entry: a saved state may have a hundred megabytes."""
    return DiskLimits(
        max_bytes=config.max_bytes,
        buffer_bytes=max(BUFFER_BYTES, sum(part_bytes)),
        daily_bytes=math.inf if config.daily_bytes is None else config.daily_bytes,
    )


def load_limits(n_blocks: int, part_bytes: Sequence[int]) -> LoadLimits:
    """A crowd that comes back leaves most of the blocks to others."""
    *block, state = part_bytes
    arena_bytes = n_blocks * sum(block) + state
    return LoadLimits(arena_bytes // HELD_PART, max(arena_bytes // AHEAD_PART, LEAST_AHEAD_BYTES))


def kept_tokens(max_bytes: int, part_bytes: Sequence[int], block_size: int) -> float:
    """How many tokens of a prompt such a limit keeps at least: every block with what its windows
    have, and a state at the end. Blocks of recurrent layers alone take nothing, and have no limit.
    """
    *block, state = part_bytes
    left_bytes = longest_path(max_bytes) - state
    if left_bytes < 0:
        return 0
    return left_bytes // sum(block) * block_size if any(block) else math.inf


def _too_small(
    max_bytes: int, rules: WriteRules, part_bytes: Sequence[int], block_size: int
) -> str:
    *block, state = part_bytes
    least_bytes = blocks_for(rules.least_tokens, block_size) * sum(block) + state
    return (
        f"a disk cache of {_mib(max_bytes)} is too small for this model: the least that is kept, "
        f"{rules.least_tokens} tokens of a prompt, needs {_mib(holding(least_bytes))}"
    )


def _mib(n_bytes: int) -> str:
    return f"{math.ceil(n_bytes / MIB):,} MiB"
