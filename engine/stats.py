"""Snapshots of the engine for those who watch it. Pure functions, called on the engine thread."""

from types import MappingProxyType

from engine.scheduler import Scheduler
from engine.timing import Timing
from engine.types import CacheStats, EngineStats, RequestInfo


def engine_stats(scheduler: Scheduler, block_bytes: int) -> EngineStats:
    counters = scheduler.counters
    return EngineStats(
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        finished=MappingProxyType(dict(counters.finished)),
        computed_prompt_tokens=counters.computed_prompt_tokens,
        cached_prompt_tokens=counters.cached_prompt_tokens,
        generated_tokens=counters.generated_tokens,
        preemptions=counters.preemptions,
        steps=counters.steps,
        cache=cache_stats(scheduler, block_bytes),
    )


def cache_stats(scheduler: Scheduler, block_bytes: int) -> CacheStats:
    store, counters = scheduler.store, scheduler.counters
    pool = store.pool
    return CacheStats(
        block_size=store.block_size,
        blocks_total=pool.n_blocks,
        blocks_free=pool.n_free,
        blocks_cached=pool.n_cached,
        blocks_held=pool.n_held,
        blocks_shared=pool.n_shared,
        arena_bytes=pool.n_blocks * block_bytes,
        nodes=store.index.n_nodes,
        queried_tokens=counters.queried_prompt_tokens,
        hit_tokens=counters.cached_prompt_tokens,
        evictions=store.counters.evictions,
        cow_copies=store.counters.cow_copies,
        groups=tuple(group.stats() for group in store.groups),
    )


def request_infos(scheduler: Scheduler, timing: Timing) -> tuple[RequestInfo, ...]:
    return tuple(
        RequestInfo(
            request_id=sequence.request.id,
            index=sequence.index,
            status=sequence.status.name.lower(),
            prompt_tokens=sequence.prompt_tokens,
            cached_tokens=sequence.cached_tokens,
            computed_tokens=sequence.computed_tokens,
            output_tokens=sequence.output_tokens,
            blocks=len(sequence.lease.table) if sequence.lease else 0,
            age_seconds=timing.age_seconds(sequence),
        )
        for sequence in scheduler.running + scheduler.waiting
    )
