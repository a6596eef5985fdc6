"""`/admin/cache/tree` and `/admin/cache/nodes`: the cache at one moment, and single nodes."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict

from engine.values import tree
from server.schemas.cache import RecentHits


class _Seen(BaseModel):
    """Made of the engine's values. Docstrings of fields, theirs included, are descriptions."""

    model_config = ConfigDict(from_attributes=True, use_attribute_docstrings=True)


class TreeDisk(_Seen):
    """The disk cache. Bytes read and written, hits and tokens are counted since start."""

    entries: int
    """Blocks, and ends of prompts within one."""
    used_bytes: int
    """Of this model's files."""
    shared_bytes: int
    """Of all models' files, to which the limit applies."""
    limit_bytes: int
    read_bytes: int
    written_bytes: int
    hits: int
    """Prompts of which something was loaded."""
    loaded_tokens: int


class TreeNode(_Seen):
    """A run of tokens that is stored once for all that use it."""

    id: int
    """An id that the node keeps while it exists, and that no other node gets."""
    parent: int | None
    namespace: str
    start: int
    """The position of its first token."""
    tokens: int
    disk_tokens: int
    """Number of its tokens on disk, from the first on."""
    blocks: int
    tail: int
    """Tokens in its last block if that is not full, else 0."""
    holders: int
    """Running sequences that hold its last block."""
    idle_seconds: float
    """Time since it, or a node below it, was last matched, written or held."""
    states: list[int]
    """Positions of saved recurrent states, the last 32."""
    holes: list[tuple[int, int]]
    """Positions [from, to) that are missing from a window, the last 32 runs."""
    next_evicted: int | None
    """Its place among the next nodes to be evicted; 1 is the first."""
    hidden: tree.HiddenNodes | None
    """Nodes below it that are left out."""

    @classmethod
    def of(cls, node: tree.TreeNode, now_seconds: float) -> Self:
        """The node at a time of the snapshot's clock."""
        seen = {name: getattr(node, name) for name in node.__slots__}
        return cls.model_validate({**seen, "idle_seconds": node.idle_seconds(now_seconds)})


class TreeRequest(_Seen):
    """A live sequence."""

    id: str
    """The request's id, with # and the index after it for all but the first choice."""
    node: int | None
    """The node with the last of its blocks in the tree."""
    namespace: str
    state: Literal["waiting", "loading", "running"]
    """`loading`: waits for a load from disk; `waiting`: for anything else."""
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    output_tokens: int


class CacheTree(_Seen):
    """The cache at one moment, bounded: held nodes and the heaviest subtrees come first."""

    version: int
    """Grows when the tree, a request or a counter has changed."""
    time: float
    """Seconds since the epoch."""
    model: str
    block_tokens: int
    arena: tree.TreeArena
    groups: list[tree.TreeGroup]
    disk: TreeDisk | None
    """Null without a disk cache."""
    nodes: list[TreeNode]
    """Parents come before their children."""
    hidden: tree.HiddenNodes
    """Nodes that are left out below the roots."""
    namespaces: list[tree.TreeNamespace]
    requests: list[TreeRequest]
    hidden_requests: tree.HiddenRequests
    adoptions: list[tree.TreeAdoption]
    """Of the last five seconds, the last 32; the oldest first."""
    recent_hits: list[RecentHits]
    """Of the last 1, 5 and 15 minutes."""
    counters: tree.TreeCounters

    @classmethod
    def of(cls, snapshot: tree.TreeSnapshot, model: str) -> Self:
        seen = {name: getattr(snapshot, name) for name in snapshot.__slots__}
        nodes = [TreeNode.of(node, snapshot.seconds) for node in snapshot.nodes]
        return cls.model_validate({**seen, "nodes": nodes, "model": model})


class NodeText(BaseModel):
    """One node: as text only where `dashboard_text` is set, and no more than its first tokens."""

    id: int
    tokens: int
    text: str | None
