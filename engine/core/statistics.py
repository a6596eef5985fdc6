"""Statistics of the engine, as the server gets them. Pure functions, on the engine thread.

`loop_stats` runs twice a step. It copies counters: its cost does not grow with the cache or queue.
"""

from engine.core.metrics import LatencyTracker
from engine.core.scheduler import Scheduler
from engine.values.stats import CacheStats, Cleared, HitCount, HitRecord, LoopStats, RequestInfo
from kvstore.sizes import StorageBytes
from kvstore.store import KVStore
from kvstore.types import Namespace


def clear(store: KVStore, sizes: StorageBytes, namespace: Namespace | None) -> Cleared:
    """Forget all that no running request holds, of one namespace or of all."""
    taken_bytes = _slot_bytes(store, sizes)
    blocks = store.clear(namespace)
    return Cleared(blocks, blocks * sizes.block + taken_bytes - _slot_bytes(store, sizes))


def saved_bytes(store: KVStore, sizes: StorageBytes) -> int:
    """Bytes that sharing saves: what more there would be if no running sequences shared any."""
    stats = [group.stats() for group in store.groups]
    slots = sum(s.saved * size for s, size in zip(stats, sizes.slots, strict=True))
    return store.pool.n_saved * sizes.block + slots


def _slot_bytes(store: KVStore, sizes: StorageBytes) -> int:
    """Bytes of the slots that are not free, in all groups."""
    stats = [group.stats() for group in store.groups]
    return sum((s.total - s.free) * size for s, size in zip(stats, sizes.slots, strict=True))


def hit_count(scheduler: Scheduler, seconds: float) -> HitCount:
    counters = scheduler.admission_counters
    return HitCount(seconds, counters.queried_prompt_tokens, counters.cached_prompt_tokens)


def loop_stats(
    scheduler: Scheduler,
    latency: LatencyTracker,
    sizes: StorageBytes,
    hits: HitRecord,
    n_contradictions: int,
) -> LoopStats:
    counters = scheduler.counters
    return LoopStats(
        running=scheduler.n_running,
        waiting=scheduler.n_waiting,
        computed_prompt_tokens=counters.computed_prompt_tokens,
        cached_prompt_tokens=scheduler.admission_counters.cached_prompt_tokens,
        generated_tokens=counters.generated_tokens,
        preemptions=counters.preemptions,
        client_preemptions=counters.client_preemptions,
        rows_sat_out=counters.rows_sat_out,
        steps=counters.steps,
        drafts=dict(counters.drafts),
        hits=hits,
        n_contradictions=n_contradictions,
        first_tokens=latency.first_tokens,
        first_token_seconds=latency.first_token_seconds,
        cache=cache_stats(scheduler, sizes),
    )


def cache_stats(scheduler: Scheduler, sizes: StorageBytes) -> CacheStats:
    store, counters = scheduler.store, scheduler.admission_counters
    pool = store.pool
    return CacheStats(
        block_size=store.block_size,
        blocks_total=pool.n_blocks,
        blocks_free=pool.n_free,
        blocks_cached=pool.n_evictable,
        blocks_held=pool.n_referenced,
        blocks_shared=pool.n_shared,
        blocks_saved=pool.n_saved,
        saved_bytes=saved_bytes(store, sizes),
        arena_bytes=sizes.arenas,
        nodes=store.index.n_nodes,
        queried_tokens=counters.queried_prompt_tokens,
        hit_tokens=counters.cached_prompt_tokens,
        evictions=store.counters.evictions,
        tail_hit_tokens=store.counters.tail_hit_tokens,
        prefix_copies=store.counters.prefix_copies,
        fork_copies=store.counters.fork_copies,
        groups=tuple(group.stats() for group in store.groups),
    )


def request_infos(scheduler: Scheduler) -> tuple[RequestInfo, ...]:
    return tuple(
        RequestInfo(
            request_id=sequence.request.id,
            index=sequence.index,
            waits_for=scheduler.wait_reason(sequence),
            prompt_tokens=sequence.prompt_tokens,
            cached_tokens=sequence.cached_tokens,
            computed_tokens=sequence.computed_tokens,
            output_tokens=sequence.output_tokens,
            blocks=len(sequence.lease.table) if sequence.lease else 0,
            accepted_draft_tokens=sequence.usage.accepted_draft_tokens,
        )
        for sequence in scheduler.running + scheduler.waiting
    )
