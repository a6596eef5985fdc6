"""What the pool knows of each model. Frozen values."""

import math
from dataclasses import dataclass
from enum import Enum, StrEnum, auto

UNKNOWN_LOAD_SECONDS = 5.0
"""Of a model that has never been loaded here."""


class State(StrEnum):
    """Of one model. Each but `unloaded` and `failed` has a process, and so takes memory."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"  # what it has accepted ends, then its process does; newcomers wait
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


class Measuring(Enum):
    """Whether it is known how many bytes of memory a model needs."""

    NOT_YET = auto()
    RUNS = auto()
    DONE = auto()


RESIDENT = frozenset({State.LOADING, State.READY, State.DRAINING})


@dataclass(frozen=True, slots=True)
class ModelState:
    """One model. Times are of one clock, in seconds."""

    need_bytes: int  # of memory, while it is resident; means nothing before it is measured
    state: State = State.UNLOADED
    n_users: int = 0  # requests that hold it
    waiting_since: float | None = None  # when the first request came that waits for it
    began_at: float = 0.0  # when loading last began
    used_at: float = 0.0  # when it was loaded, or a request last let go of it
    load_seconds: float = UNKNOWN_LOAD_SECONDS  # the last time
    retry_at: float = 0.0  # a failed one is not loaded before
    keep_until: float = math.inf  # an idle one is unloaded then; infinite: never for its age
    is_pinned: bool = False  # never unloaded for others nor for its age; loaded again if it dies
    measuring: Measuring = Measuring.DONE

    @property
    def is_resident(self) -> bool:
        return self.state in RESIDENT

    @property
    def is_idle(self) -> bool:
        return self.state is State.READY and not self.n_users
