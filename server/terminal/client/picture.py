"""Pictures of a daemon's cache, read leniently: only what is drawn of them."""

from typing import Literal

from pydantic import BaseModel, Field


class Arena(BaseModel):
    """Blocks by state: free, cached (only the tree holds it), held (by live sequences)."""

    blocks: int
    free: int
    cached: int
    held: int
    block_bytes: int


class Hidden(BaseModel):
    """Nodes that a picture leaves out, summed up."""

    nodes: int = 0
    tokens: int = 0


class Node(BaseModel):
    """A run of tokens that is stored once, from `start` on. None has no parent."""

    id: int
    parent: int | None
    namespace: str
    start: int
    tokens: int
    holders: int
    idle_seconds: float
    next_evicted: int | None = None
    hidden: Hidden | None = None


class Namespace(BaseModel):
    id: str
    name: str
    tokens: int


class Request(BaseModel):
    id: str
    state: Literal["waiting", "running"]
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    output_tokens: int


class HiddenRequests(BaseModel):
    running: int = 0
    waiting: int = 0


class Counters(BaseModel):
    """Since the daemon's start; they only grow."""

    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    evictions: int
    first_tokens: int
    first_token_seconds: float


class Picture(BaseModel):
    """The cache at one moment. Parents come before their children."""

    model: str
    arena: Arena
    nodes: list[Node]
    hidden: Hidden
    namespaces: list[Namespace]
    requests: list[Request]
    hidden_requests: HiddenRequests = Field(default_factory=HiddenRequests)
    counters: Counters
