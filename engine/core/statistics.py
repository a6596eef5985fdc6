"""Reads the statistics of a running engine for the server."""

from collections.abc import Sequence

from engine.core.scheduler import Scheduler
from engine.values.stats import (
    CacheStats,
    Cleared,
    DecodeStats,
    EngineStats,
    KVEventStats,
    MemoryStats,
    RankStats,
)
from kvstore.sizes import StorageBytes
from kvstore.slots import GroupStats
from kvstore.store import KVStore


def snapshot(
    scheduler: Scheduler,
    sizes: StorageBytes,
    memory: MemoryStats,
    decode: DecodeStats,
    kv_events: KVEventStats | None = None,
    ranks: RankStats | None = None,
) -> EngineStats:
    """Read all statistics as one value. Any thread may call this at any time: while a step runs,
    and when the loop has ended.

    It reads numbers that the engine thread writes, so figures may be microseconds apart. The kinds
    of blocks add up to their total.
    """
    metrics, drafts = scheduler.metrics, scheduler.drafts
    return EngineStats(
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        computed_prompt_tokens=metrics.computed_prompt_tokens,
        generated_tokens=metrics.generated_tokens,
        preemptions=metrics.preemptions,
        client_preemptions=metrics.client_preemptions,
        recomputed_sequences=metrics.recomputed_sequences,
        late_rows=metrics.late_rows,
        steps=metrics.steps,
        drafts=metrics.drafts.copy(),
        contradictions=metrics.contradictions,
        latencies=metrics.latencies(),
        cache=_cache_stats(scheduler, sizes),
        memory=memory,
        decode=decode,
        kv_events=kv_events,
        draft_model=None if drafts is None or drafts.model is None else drafts.model.stats(),
        images=None if scheduler.images is None else scheduler.images.stats(),
        ranks=ranks,
    )


def _cache_stats(scheduler: Scheduler, sizes: StorageBytes) -> CacheStats:
    store, metrics = scheduler.store, scheduler.metrics
    pool, counters = store.pool, store.counters
    total, free, saved = pool.n_blocks, pool.n_free, max(pool.n_saved, 0)
    held = min(pool.n_referenced, total - free)  # a block may have moved since `free` was read
    groups = tuple(group.stats() for group in store.groups)
    return CacheStats(
        block_size=store.block_size,
        blocks_total=total,
        blocks_free=free,
        blocks_cached=total - free - held,
        blocks_held=held,
        blocks_pinned=min(scheduler.pins.n_blocks, held),
        blocks_shared=min(pool.n_shared, held),
        blocks_saved=saved,
        saved_bytes=saved_bytes(saved, groups, sizes),
        arena_bytes=sizes.arenas,
        nodes=0 if store.tree is None else store.tree.n_nodes,
        hit_tokens=metrics.cached_prompt_tokens,  # first: an admission adds to it last
        queried_tokens=metrics.queried_prompt_tokens,
        warmed_tokens=metrics.warmed_tokens,
        evictions=counters.evictions,
        tail_hit_tokens=counters.tail_hit_tokens,
        prefix_copies=counters.prefix_copies,
        fork_copies=counters.fork_copies,
        groups=groups,
        recent_hits=metrics.recent_hits(),
        disk=None if scheduler.disk is None else scheduler.disk.stats(),
    )


def saved_bytes(n_saved_blocks: int, groups: Sequence[GroupStats], sizes: StorageBytes) -> int:
    """Bytes that running sequences would need in addition if they shared nothing."""
    slots = sum(group.saved * size for group, size in zip(groups, sizes.slots, strict=True))
    return n_saved_blocks * sizes.block + slots


def forget_cleared(store: KVStore, sizes: StorageBytes, most: int) -> Cleared | None:
    """Free some `most` cleared blocks, and their slots. None where nothing is left to do."""
    free_slots = [group.slots.n_free for group in store.groups]
    n_blocks = store.forget_cleared(most)
    if n_blocks is None:
        return None
    freed = zip(store.groups, free_slots, sizes.slots, strict=True)
    slots = sum((group.slots.n_free - n_free) * size for group, n_free, size in freed)
    return Cleared(n_blocks, n_blocks * sizes.block + slots)
