"""Cache operations and their results. Frozen values."""

from dataclasses import dataclass
from enum import StrEnum


class CacheTier(StrEnum):
    """Where KV is kept."""

    MEMORY = "memory"  # the arena
    DISK = "disk"  # below it; see DiskCacheConfig


ALL_TIERS = frozenset(CacheTier)


@dataclass(frozen=True, slots=True)
class Cleared:
    """What a cache clear has freed in the arena. Entries on disk cannot be found from then on, and
    their bytes are free soon after.
    """

    blocks: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Probed:
    """What a prompt would find in the cache: tokens, and the hashes of the whole blocks."""

    cached_tokens: int
    block_digests: tuple[str, ...]  # hexadecimal; see kvstore/digest.py
