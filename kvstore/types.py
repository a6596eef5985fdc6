"""The few types that everything in kvstore/ shares."""

from dataclasses import dataclass
from typing import NewType, TypeAlias

BlockId = NewType("BlockId", int)
"""Index of a block in the arena, from 0."""

SlotId = NewType("SlotId", int)
"""Index of a slot of a group's own storage, from 0: a window's block, or a whole state."""

Finding: TypeAlias = str | None
"""What a recount yields: a problem, or None after a piece of work that found none."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """The root that a prefix hangs from: KV is shared only between equal namespaces."""

    model: str = ""
    adapter: str = ""
    kv_format: str = ""
    cache_salt: str = ""


DEFAULT_NAMESPACE = Namespace()
