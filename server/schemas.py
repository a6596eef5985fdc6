"""The JSON of `/admin` that the terminal reads, too. Where the engine has the same value, it is the
engine's. Imports nothing of the server.
"""

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from engine.values import tree
from engine.values.request import WaitReason
from engine.values.stats import CacheStats, EngineStats, MemoryStats, RecentHits

LiveStatus: TypeAlias = Literal["preparing", "waiting", "running", "sending"]


class RequestSummary(BaseModel):
    """What is known of a request while it is answered and afterwards. None of its text."""

    model_config = ConfigDict(frozen=True)

    id: str = Field(description="As in `X-Request-Id`, and the end of the answer's own.")
    route: str
    model: str = Field(description="The name by which the model was asked for.")
    client: str = Field(description="An address, or the key's name where there are several keys.")
    key: str | None = Field(description="The name of its API key.")
    sequences: int = Field(description="Answers asked for: `n` of each prompt.")
    prompt_tokens: int = Field(description="Of all its prompts.")
    cached_tokens: int = Field(description="Of these, found in the cache.")
    output_tokens: int = Field(description="Written, by all its sequences.")
    accepted_draft_tokens: int = Field(description="Of these, those that a draft had right.")
    first_token_seconds: float | None = Field(
        description="From when the engine was asked to its first token."
    )
    tokens_per_second: float | None = Field(
        description="Tokens written after the first, by the seconds since. Null before there are."
    )


class LiveRequest(RequestSummary):
    """A request that is being answered. It runs while one of its sequences does."""

    status: LiveStatus = Field(
        description="`preparing`: its grammar is tried, or the engine has yet to take it in; "
        "`sending`: all is written, and the client has not taken it."
    )
    waits_for: WaitReason | None = Field(
        description="With `waiting`: why its first sequence that waits has not been admitted."
    )
    age_seconds: float = Field(description="Since the engine was asked.")
    computed_tokens: int = Field(description="Of its prompts, with KV: computed or adopted.")
    blocks: int = Field(description="In its sequences' tables; one in several counts in each.")


class LiveRequests(BaseModel):
    requests: list[LiveRequest]


class FinishedRequest(RequestSummary):
    """A request that the engine was asked to answer, and that is over."""

    number: int = Field(description="Since the start: 1 is the first that was over.")
    time: float = Field(description="When it was over, in seconds since the epoch.")
    seconds: float = Field(
        description="From when the engine was asked to its end, with the sending."
    )
    status: int = Field(
        description="The HTTP status of what came of it, also where a stream had begun: "
        "499 where the client left."
    )
    code: str | None = Field(description="The error's code; null without an error.")


class State(StrEnum):
    """Of one model. Each but `unloaded` and `failed` has a process, and so takes memory."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"  # its accepted requests end, then its process does; new ones wait
    FAILED = "failed"  # to load, or its process has died

    @property
    def words(self) -> str:
        """The state as the end of a sentence that begins with the model's name."""
        return _WORDS[self]


_WORDS = {
    State.UNLOADED: "is not loaded",
    State.LOADING: "is being loaded",
    State.READY: "is loaded",
    State.DRAINING: "is being unloaded",
    State.FAILED: "has failed",
}

RESIDENT = frozenset({State.LOADING, State.READY, State.DRAINING})


class PooledModelInfo(BaseModel):
    id: str = Field(description="Its own name.")
    aliases: list[str]
    adapters: list[str]
    source: str = Field(description="The directory or repository that it comes from.")
    state: State
    failure: str | None = Field(description="Why it is not there, where it should be.")
    progress: str | None = Field(
        description="While it is fetched or loaded: the last word on how that goes."
    )
    progress_share: float | None = Field(
        description="Of its repository what has been fetched, or of the time that loading took the "
        "last time what has passed: 0 to 1. Null where that is not known."
    )
    requests: int = Field(description="Those that use it.")
    waiting: int = Field(description="Those that wait for it to be loaded.")
    memory_bytes: int | None = Field(
        description="What it takes of the budget while it is loaded. Null before it is known."
    )
    resident_bytes: int | None = Field(description="Of its process, as the system counts.")
    decode: str | None = Field(
        description="Whether steady decodes are compiled or eager, and why. Null where it is not "
        "loaded."
    )
    idle_seconds: float | None = Field(description="Since it was last used; null where it is not.")
    ttl_seconds: float | None = Field(
        description="How long it stays loaded after a request that does not say how long "
        "(keep_alive); null: without end."
    )
    seconds_left: float | None = Field(
        description="Until it is unloaded if no other request uses it; null where it is not "
        "loaded, or stays."
    )
    pinned: bool
    load_seconds: float | None = Field(description="How long loading took the last time.")
    retry_seconds: float | None = Field(
        description="Of a failed one: so long it is not tried again."
    )


class PooledModels(BaseModel):
    budget_bytes: int | None = Field(description="Of all models together. Null: no limit of ours.")
    models: list[PooledModelInfo]


class ProbeResponse(BaseModel):
    prompt_tokens: int
    cached_tokens: int
    block_digests: list[str]  # of the whole blocks that would hit, hexadecimal


class Remembered(BaseModel):
    """Numbers of what the server remembers of conversations in addition to their KV."""

    replays: int  # answers with tool calls, as tokens, for when they come back
    responses: int  # stored by /v1/responses


class ClearResponse(BaseModel):
    blocks_freed: int
    bytes_freed: int
    forgotten: Remembered
    kept: Remembered  # `what` names what else is to be cleared


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStatsResponse(CacheStats):
    """The KV store of a model, and the memory of its engine, in bytes."""

    memory: MemoryStats

    @classmethod
    def of(cls, stats: EngineStats) -> Self:
        counts = {each.name: getattr(stats.cache, each.name) for each in fields(CacheStats)}
        return cls(**counts, memory=stats.memory)


class _FromEngine(BaseModel):
    """Made of the engine's values. The docstrings of fields are their descriptions."""

    model_config = ConfigDict(from_attributes=True, use_attribute_docstrings=True)


class TreeDisk(_FromEngine):
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


class TreeNode(_FromEngine):
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
        values = {name: getattr(node, name) for name in node.__slots__}
        return cls.model_validate({**values, "idle_seconds": node.idle_seconds(now_seconds)})


class TreeRequest(_FromEngine):
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


class CacheTree(_FromEngine):
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
        values = {name: getattr(snapshot, name) for name in snapshot.__slots__}
        nodes = [TreeNode.of(node, snapshot.seconds) for node in snapshot.nodes]
        return cls.model_validate({**values, "nodes": nodes, "model": model})
