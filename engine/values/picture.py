"""Pictures of the cache, for dashboards. Frozen values; no token and no salt is in them."""

from dataclasses import dataclass

from engine.values.stats import DiskCacheStats, RecentHits, RequestInfo


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
    """The storage of the windows of one length in tokens, in blocks, or of recurrent states."""

    kind: str  # "window" or "recurrent"
    tokens: int | None  # the length of the windows; None for states
    slots: int
    used: int


@dataclass(frozen=True, slots=True)
class Hidden:
    """What a picture leaves out, summed up."""

    nodes: int = 0
    tokens: int = 0
    blocks: int = 0

    def less(self, other: "Hidden") -> "Hidden":
        """What is left when `other` is shown."""
        return Hidden(
            self.nodes - other.nodes, self.tokens - other.tokens, self.blocks - other.blocks
        )


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
    states: tuple[int, ...]  # positions after which a saved recurrent state stands
    holes: tuple[tuple[int, int], ...]  # positions [from, to) that a window no longer has
    next_evicted: int | None  # 1 is the first to go
    hidden: Hidden | None  # below it and left out


@dataclass(frozen=True, slots=True)
class PictureNamespace:
    id: str
    name: str
    nodes: int
    tokens: int


@dataclass(frozen=True, slots=True)
class PictureAdoption:
    """How much of a prompt that was admitted a moment ago was found in the tree."""

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
    """Counts since the engine's start; they only grow."""

    prompt_tokens: int  # computed or adopted
    cached_tokens: int  # adopted
    generated_tokens: int
    evictions: int
    requests: int  # sequences requested
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
    disk: DiskCacheStats | None  # None without a disk cache
    nodes: tuple[PictureNode, ...]
    hidden: Hidden  # below roots
    namespaces: tuple[PictureNamespace, ...]
    requests: tuple[RequestInfo, ...]
    hidden_requests: HiddenRequests
    adoptions: tuple[PictureAdoption, ...]  # the last ones, oldest first
    recent_hits: tuple[RecentHits, ...]
    counters: PictureCounters
    cost_seconds: float = 0.0  # of a processor, that it took


@dataclass(frozen=True, slots=True)
class NodeTokens:
    """The number of tokens of a node, and the ids of the first of them, as many as requested."""

    id: int
    tokens: int
    token_ids: tuple[int, ...]
