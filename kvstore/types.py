"""Types that all modules of kvstore/ share."""

from dataclasses import dataclass
from typing import NewType, TypeAlias

BlockId = NewType("BlockId", int)
"""Index of a block in the arena, from 0."""

SlotId = NewType("SlotId", int)
"""Index of a slot in the storage of a group, from 0: a block of a window, or a whole state."""

Finding: TypeAlias = str | None
"""A problem that a recount found, or None after a piece of work without problems."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """The root of a prefix. KV is shared only within one namespace."""

    model: str = ""
    adapter: str = ""
    kv_format: str = ""
    cache_salt: str = ""


DEFAULT_NAMESPACE = Namespace()


@dataclass(slots=True)
class StoreCounters:
    """Counts since start; they only grow."""

    evictions: int = 0
    prefix_copies: int = 0  # of a partly adopted block, before the lease that adopted it wrote
    fork_copies: int = 0  # of the last block of a prompt with several outputs
    tail_hit_tokens: int = 0  # adopted beyond whole blocks
