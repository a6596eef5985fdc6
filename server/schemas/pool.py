"""`/admin/models`: which models there are, and which are in memory."""

from enum import StrEnum

from pydantic import BaseModel, Field


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
