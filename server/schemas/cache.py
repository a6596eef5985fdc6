"""The `/admin/cache` routes but for pictures of the tree."""

from typing import Self

from pydantic import BaseModel, ConfigDict

from engine.values.stats import EngineStats


class ProbeResponse(BaseModel):
    prompt_tokens: int
    cached_tokens: int
    block_digests: list[str]  # of the whole blocks that would hit, hexadecimal


class Remembered(BaseModel):
    """What the server remembers of conversations, beside their KV: how many of each."""

    replays: int  # answers with tool calls, as tokens, for when they come back
    responses: int  # stored by /v1/responses


class ClearResponse(BaseModel):
    blocks_freed: int
    bytes_freed: int
    forgotten: Remembered
    kept: Remembered  # `what` names what else is to be cleared


class GroupSlots(BaseModel):
    """Slots of a kind of layer that does not keep every token: a window's blocks, or states."""

    model_config = ConfigDict(from_attributes=True)

    name: str
    total: int
    free: int
    cached: int
    held: int
    saved: int  # slots that there would be besides if nothing were shared
    evictions: int
    unresumable_tokens: int  # that prompts matched, and had to compute for want of a slot


class RecentHits(BaseModel):
    """Prompt tokens looked up in the last so many seconds, and those found."""

    model_config = ConfigDict(from_attributes=True)

    seconds: int
    queried_tokens: int
    hit_tokens: int


class DiskCache(BaseModel):
    """What is on disk now; from `read_bytes` on, what was read and written since the start."""

    model_config = ConfigDict(from_attributes=True)

    entries: int  # blocks, and ends of prompts within one
    used_bytes: int  # of this model's files, as du counts them
    shared_bytes: int  # of all models' files, which the limit is for
    limit_bytes: int
    buffered_bytes: int  # on their way to the disk
    read_bytes: int
    written_bytes: int
    hits: int  # loads that brought something, whole or not
    loaded_tokens: int
    load_seconds: float
    given_up_loads: int  # because the disk delivered nothing for seconds
    evicted_entries: int
    refused_entries: int  # accepted, and not written for lack of space or of today's budget
    failures: dict[str, int]  # of reading and writing, by fault
    write_fault: str | None  # of the last write; null: it succeeded; else `/health` says degraded
    is_day_spent: bool  # nothing is written before tomorrow (UTC)
    ended_threads: list[str]  # that should run and do not; `/health` says degraded then


class PromisedMemory(BaseModel):
    """What was reckoned with when the model was found to fit. Bytes."""

    model_config = ConfigDict(from_attributes=True)

    weights: int
    storage: int  # KV, windows and as many recurrent states as there may be
    workspace: int  # of a step
    cache: int  # what MLX's buffer cache keeps in addition


class MemoryUse(BaseModel):
    """The first three are of MLX's allocator. Bytes."""

    model_config = ConfigDict(from_attributes=True)

    active: int
    cached: int  # buffers that nobody uses, for the next step
    peak: int  # of `active`, since the model was loaded
    resident: int  # of the whole process
    promise: PromisedMemory


class CacheStatsResponse(BaseModel):
    """A block is free, cached (only the tree holds it) or held (in at least one table)."""

    model_config = ConfigDict(from_attributes=True)

    block_size: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    blocks_held: int
    blocks_shared: int  # in two tables or more
    blocks_saved: int  # that there would be besides if each sequence had copies of its own
    saved_bytes: int  # of these, and of what windows share
    arena_bytes: int
    nodes: int
    queried_tokens: int
    hit_tokens: int
    recent_hits: list[RecentHits]  # of the last 1, 5 and 15 minutes
    evictions: int
    tail_hit_tokens: int  # adopted beyond whole blocks
    prefix_copies: int  # blocks copied because a prompt goes on within what it has adopted
    fork_copies: int  # and because outputs of one prompt do
    groups: list[GroupSlots]
    disk: DiskCache | None  # null without a disk cache
    memory: MemoryUse

    @classmethod
    def of(cls, stats: EngineStats) -> Self:
        cache = stats.cache
        counts = {name: getattr(cache, name) for name in cache.__slots__}
        return cls.model_validate({**counts, "memory": stats.memory})
