"""Pictures of the cache, for dashboards. Frozen values; no token and no salt is in them."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from engine.values.stats import RecentHits


@dataclass(frozen=True, slots=True)
class ArenaBlocks:
    """A block is free, cached (only the tree holds it) or held (in at least one table)."""

    blocks: int
    free: int
    cached: int
    held: int
    saved_bytes: int  # that there would be besides if each table had copies of its own
    block_bytes: int


@dataclass(frozen=True, slots=True)
class GroupSlots:
    """The storage of windows of so many `tokens`, in blocks, or of recurrent states."""

    kind: str  # "window" or "recurrent"
    tokens: int | None
    slots: int
    used: int


@dataclass(frozen=True, slots=True)
class DiskUse:
    """The disk cache. Counted since start are those from `read_bytes` on."""

    entries: int  # blocks, and ends of prompts within one
    used_bytes: int
    shared_bytes: int  # of all models
    limit_bytes: int
    read_bytes: int
    written_bytes: int
    hits: int  # prompts of which something was loaded
    loaded_tokens: int


@dataclass(frozen=True, slots=True)
class Hidden:
    """What a picture leaves out, summed up."""

    nodes: int = 0
    tokens: int = 0
    blocks: int = 0


@dataclass(frozen=True, slots=True)
class PictureNode:
    """A run of tokens that is stored once, at the positions from `start` on."""

    id: int
    parent: int | None
    namespace: str
    start: int
    tokens: int
    disk_tokens: int  # of them, from the first on, that are on disk
    blocks: int
    tail: int  # tokens in its last block where that is not full, else 0
    holders: int  # live sequences whose path goes through its last block
    idle_seconds: float  # since it, or what is below it, was last used or held
    states: tuple[int, ...]  # positions behind which a saved recurrent state stands
    holes: tuple[tuple[int, int], ...]  # positions [from, to) that a window no longer has
    next_evicted: int | None  # 1 is the first to go
    hidden: Hidden | None  # below it and left out


@dataclass(frozen=True, slots=True)
class PictureNamespace:
    id: str
    name: str
    nodes: int
    tokens: int


RequestState: TypeAlias = Literal["waiting", "loading", "running"]
"""A loading sequence waits for a load from disk."""


@dataclass(frozen=True, slots=True)
class PictureRequest:
    """A live sequence, and the node with the last of its blocks that the tree has."""

    id: str
    node: int | None
    namespace: str
    state: RequestState
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class PictureAdoption:
    """Of a prompt that was admitted a moment ago, how much was found in the tree."""

    node: int  # with the last token that was found
    tokens: int  # of the prompt, from the first on
    seconds: float  # how long ago


@dataclass(frozen=True, slots=True)
class HiddenRequests:
    """Live sequences that a picture leaves out. `waiting` includes those that are loading."""

    running: int
    waiting: int


@dataclass(frozen=True, slots=True)
class PictureCounters:
    """Since start; they only grow."""

    prompt_tokens: int  # computed or adopted
    cached_tokens: int  # adopted
    generated_tokens: int
    evictions: int
    requests: int  # sequences asked for
    first_tokens: int
    first_token_seconds: float  # from arrival to first token, of all of them together


@dataclass(frozen=True, slots=True)
class CachePicture:
    """The tree, bounded: parents before children, what is held and the heaviest subtrees first.

    `version` grows whenever the tree, a request or a counter has changed.
    """

    version: int
    time: float  # seconds since the epoch
    block_tokens: int
    arena: ArenaBlocks
    groups: tuple[GroupSlots, ...]
    disk: DiskUse | None  # None without a disk cache
    nodes: tuple[PictureNode, ...]
    hidden: Hidden  # below roots
    namespaces: tuple[PictureNamespace, ...]
    requests: tuple[PictureRequest, ...]
    hidden_requests: HiddenRequests
    adoptions: tuple[PictureAdoption, ...]  # the last ones, oldest first
    recent_hits: tuple[RecentHits, ...]
    counters: PictureCounters
    cost_seconds: float = 0.0  # of a processor, that it took


@dataclass(frozen=True, slots=True)
class NodeTokens:
    """How many tokens a node has, and as many of their ids as were asked for."""

    id: int
    tokens: int
    token_ids: tuple[int, ...]
