"""The `/admin/cache` routes but for pictures of the tree."""

from pydantic import BaseModel, ConfigDict


class ProbeResponse(BaseModel):
    prompt_tokens: int
    cached_tokens: int
    block_digests: list[str]  # of the whole blocks that would hit, hexadecimal


class ClearResponse(BaseModel):
    blocks_freed: int
    bytes_freed: int


class GroupSlots(BaseModel):
    """Slots of a kind of layer that does not keep every token: a window's blocks, or states."""

    model_config = ConfigDict(from_attributes=True)

    name: str
    total: int
    free: int
    cached: int
    held: int
    evictions: int


class CacheStatsResponse(BaseModel):
    """A block is free, cached (only the tree holds it) or held (in at least one table)."""

    model_config = ConfigDict(from_attributes=True)

    block_size: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    blocks_held: int
    blocks_shared: int
    arena_bytes: int
    nodes: int
    queried_tokens: int
    hit_tokens: int
    evictions: int
    cow_copies: int
    groups: list[GroupSlots]
