"""The prefix cache as dashboards show it. Frozen values, without prompt tokens and cache salts.

The admin API has most of these values as they are, with the docstrings of fields as descriptions.
"""

from dataclasses import dataclass, replace
from typing import Literal

from engine.values.stats import DiskCacheStats, RecentHits, RequestInfo


@dataclass(frozen=True, slots=True)
class TreeArena:
    """A block is free, cached (only the tree holds it) or held (in at least one table)."""

    blocks: int
    free: int
    cached: int
    held: int
    saved_bytes: int
    """Bytes that would be needed in addition if each sequence had copies of its own."""
    block_bytes: int


@dataclass(frozen=True, slots=True)
class TreeGroup:
    """Storage of layers that do not keep every token: a window's blocks, or recurrent states."""

    kind: Literal["window", "recurrent"]
    tokens: int | None
    """The length of the window; null for states."""
    slots: int
    used: int


@dataclass(frozen=True, slots=True)
class HiddenNodes:
    """Sums over the nodes that are left out."""

    nodes: int = 0
    tokens: int = 0
    blocks: int = 0

    def less(self, other: "HiddenNodes") -> "HiddenNodes":
        """The sums less the sums of `other`."""
        return HiddenNodes(
            self.nodes - other.nodes, self.tokens - other.tokens, self.blocks - other.blocks
        )


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A run of tokens that is stored once, at the positions from `start` on."""

    id: int
    parent: int | None
    namespace: str
    start: int
    tokens: int
    disk_tokens: int  # tokens on disk, counted from the node's first
    blocks: int
    tail: int  # tokens in its last block if that is not full, else 0
    holders: int  # running sequences that hold its last block
    used_seconds: float | None  # when its subtree was last used; None while it is held
    states: tuple[int, ...]  # positions after which a recurrent state is saved
    holes: tuple[tuple[int, int], ...]  # positions [from, to) that are missing from a window
    next_evicted: int | None  # its place in the order of eviction; 1 is the first
    hidden: HiddenNodes | None  # left out below it

    def idle_seconds(self, now_seconds: float) -> float:
        """The time since the last use of the subtree; 0 while a running sequence holds it."""
        used = now_seconds if self.used_seconds is None else self.used_seconds
        return round(max(now_seconds - used, 0.0), 1)


@dataclass(frozen=True, slots=True)
class TreeNamespace:
    """The nodes of one adapter and one salt, which is not shown. Prompts in different namespaces
    share no blocks.
    """

    id: str
    name: str
    nodes: int
    tokens: int


@dataclass(frozen=True, slots=True)
class TreeAdoption:
    """The cached tokens that a prompt adopted when it was admitted a moment ago."""

    node: int
    """The node with the last adopted token."""
    tokens: int
    """Number of adopted tokens, from the prompt's first on."""
    seconds: float
    """How long ago."""


@dataclass(frozen=True, slots=True)
class HiddenRequests:
    """Live sequences that are left out. `waiting` includes those that are loading."""

    running: int
    waiting: int


@dataclass(frozen=True, slots=True)
class TreeCounters:
    """Counts since the engine's start; they only grow."""

    prompt_tokens: int
    """Computed, or adopted from the cache."""
    cached_tokens: int
    """Adopted from the cache."""
    generated_tokens: int
    evictions: int
    requests: int
    """Requested sequences."""
    first_tokens: int
    first_token_seconds: float
    """Sum of the times from a request's arrival to its first token."""


@dataclass(frozen=True, slots=True)
class TreeSnapshot:
    """The cache at one moment, with a bounded number of nodes: parents before children, held nodes
    and the heaviest subtrees first.

    `version` grows whenever the tree, a request or a counter has changed, but not with time.
    """

    version: int
    time: float  # seconds since the epoch
    seconds: float  # of the clock of `TreeNode.used_seconds`
    block_tokens: int
    arena: TreeArena
    groups: tuple[TreeGroup, ...]
    disk: DiskCacheStats | None  # None without a disk cache
    nodes: tuple[TreeNode, ...]
    hidden: HiddenNodes  # left out below the roots
    namespaces: tuple[TreeNamespace, ...]
    requests: tuple[RequestInfo, ...]
    hidden_requests: HiddenRequests
    adoptions: tuple[TreeAdoption, ...]  # the latest, oldest first
    recent_hits: tuple[RecentHits, ...]
    counters: TreeCounters
    cost_seconds: float = 0.0  # of processor time, for making it


@dataclass(frozen=True, slots=True)
class TreeChanges:
    """A snapshot in terms of an earlier one, whose version is `since`.

    `snapshot.nodes` has only the nodes that are new or differ, `order` the ids of all nodes.
    """

    since: int
    snapshot: TreeSnapshot
    order: tuple[int, ...]

    @classmethod
    def between(cls, before: TreeSnapshot, after: TreeSnapshot) -> "TreeChanges":
        """The changes that lead from one snapshot to another of the same cache."""
        known = {node.id: node for node in before.nodes}
        changed = tuple(node for node in after.nodes if node != known.get(node.id))
        order = tuple(node.id for node in after.nodes)
        return cls(before.version, replace(after, nodes=changed), order)

    def applied_to(self, before: TreeSnapshot) -> TreeSnapshot:
        """The later snapshot. `before` must have the version `since`."""
        nodes = {node.id: node for node in (*before.nodes, *self.snapshot.nodes)}
        return replace(self.snapshot, nodes=tuple(nodes[each] for each in self.order))


IMAGE = -1
"""Stands for an image among the tokens of a node. It is no token's id."""


@dataclass(frozen=True, slots=True)
class NodeTokens:
    """The number of tokens of a node, and the ids of as many of the first as were requested. An
    image, or the part of it that the node has, has one id, IMAGE.
    """

    id: int
    tokens: int
    token_ids: tuple[int, ...]
