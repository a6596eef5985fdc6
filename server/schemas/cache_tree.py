"""`/admin/cache/tree` and `/admin/cache/nodes`: the cache at one moment, and single nodes."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from engine.values import tree
from server.schemas.cache import RecentHits


class _Seen(BaseModel):
    """Made of the engine's values, which need no second look."""

    model_config = ConfigDict(from_attributes=True)


class TreeArena(_Seen):
    """A block is free, cached (only the tree holds it) or held (in at least one table)."""

    blocks: int
    free: int
    cached: int
    held: int
    saved_bytes: int = Field(
        description="That there would be besides if each sequence had copies of its own."
    )
    block_bytes: int


class TreeGroup(_Seen):
    """What layers keep that do not keep every token: a window's blocks, or states."""

    kind: Literal["window", "recurrent"]
    tokens: int | None = Field(description="How many a window is long.")
    slots: int
    used: int


class TreeDisk(_Seen):
    """The disk cache. Bytes read and written, hits and tokens are counted since start."""

    entries: int = Field(description="Blocks, and ends of prompts within one.")
    used_bytes: int = Field(description="Of this model's files.")
    shared_bytes: int = Field(description="Of all models' files, which the limit is for.")
    limit_bytes: int
    read_bytes: int
    written_bytes: int
    hits: int = Field(description="Prompts of which something was loaded.")
    loaded_tokens: int


class HiddenNodes(_Seen):
    """What a picture leaves out, summed up."""

    nodes: int
    tokens: int
    blocks: int


class TreeNode(_Seen):
    """A run of tokens that is stored once, whoever uses it."""

    id: int = Field(description="The same for as long as the node exists, and of no other after.")
    parent: int | None
    namespace: str
    start: int = Field(description="The position of its first token.")
    tokens: int
    disk_tokens: int = Field(description="Of its tokens, from the first on, that are on disk.")
    blocks: int
    tail: int = Field(description="Tokens in its last block where that is not full, else 0.")
    holders: int = Field(description="Live sequences whose path goes through its last block.")
    idle_seconds: float = Field(
        description="Since it was last matched, written or held, or something below it was."
    )
    states: list[int] = Field(
        description="Positions at which a saved recurrent state stands, the last 32."
    )
    holes: list[tuple[int, int]] = Field(
        description="Positions [from, to) that a window no longer has, the last 32 runs."
    )
    next_evicted: int | None = Field(
        description="Its place among the next that would be evicted; 1 is the first."
    )
    hidden: HiddenNodes | None = Field(description="What is below it and left out.")

    @classmethod
    def of(cls, node: tree.TreeNode, now_seconds: float) -> Self:
        """The node at a time of the snapshot's clock."""
        seen = {name: getattr(node, name) for name in node.__slots__}
        return cls.model_validate({**seen, "idle_seconds": node.idle_seconds(now_seconds)})


class TreeNamespace(_Seen):
    """Prompts share nothing with those of another. The salt itself is not told."""

    id: str
    name: str
    nodes: int
    tokens: int


class TreeRequest(_Seen):
    """A live sequence."""

    id: str = Field(description="The request's; behind # the index of one of several choices.")
    node: int | None = Field(description="The node with the last of its blocks in the tree.")
    namespace: str
    state: Literal["waiting", "loading", "running"] = Field(
        description="`loading`: it waits for what is being read from disk; `waiting`: for others."
    )
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    output_tokens: int


class TreeAdoption(_Seen):
    """Of a prompt that was admitted a moment ago, how much was found in the cache."""

    node: int = Field(description="The node with the last token that was found.")
    tokens: int = Field(description="How many were found of the prompt, from its first on.")
    seconds: float = Field(description="How long ago.")


class HiddenRequests(_Seen):
    """Live sequences that a picture leaves out. `waiting` includes those that are loading."""

    running: int
    waiting: int


class TreeCounters(_Seen):
    """Since start; they only grow."""

    prompt_tokens: int = Field(description="Computed, or adopted from the cache.")
    cached_tokens: int = Field(description="Adopted from the cache.")
    generated_tokens: int
    evictions: int
    requests: int = Field(description="Sequences asked for.")
    first_tokens: int
    first_token_seconds: float = Field(
        description="From a request's arrival to its first token, of all of them together."
    )


class CacheTree(_Seen):
    """The cache at one moment, bounded: what is held and the heaviest subtrees come first."""

    version: int = Field(description="Grows when the tree, a request or a counter has changed.")
    time: float = Field(description="Seconds since the epoch.")
    model: str
    block_tokens: int
    arena: TreeArena
    groups: list[TreeGroup]
    disk: TreeDisk | None = Field(description="Null without a disk cache.")
    nodes: list[TreeNode] = Field(description="Parents come before their children.")
    hidden: HiddenNodes = Field(description="What is left out of the first nodes of namespaces.")
    namespaces: list[TreeNamespace]
    requests: list[TreeRequest]
    hidden_requests: HiddenRequests
    adoptions: list[TreeAdoption] = Field(
        description="Of the last five seconds, the last 32; the oldest first."
    )
    recent_hits: list[RecentHits] = Field(description="Of the last 1, 5 and 15 minutes.")
    counters: TreeCounters

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
