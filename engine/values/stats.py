"""Statistics of the engine, its caches and its memory. Frozen values."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from engine.values.output import FinishReason
from engine.values.request import RefusalReason, WaitReason
from kvstore.slots import GroupStats
from kvstore.tier.types import Fault


class DraftSource(StrEnum):
    """What a draft is taken from."""

    GRAMMAR = "grammar"  # a guide allows no other continuation
    PREDICTION = "prediction"  # the request's own
    TREE = "tree"  # what was cached behind the same tokens
    OWN = "own"  # the request's prompt and output, where they repeat
    ANSWERS = "answers"  # other outputs of the namespace


class CacheTier(StrEnum):
    """Where KV is kept."""

    MEMORY = "memory"  # the arena
    DISK = "disk"  # below it; see DiskCacheConfig


ALL_TIERS = frozenset(CacheTier)


@dataclass(frozen=True, slots=True)
class Cleared:
    """What a cache clear has freed in the arena. Entries on disk cannot be found from then on, and
    their bytes are free soon after.
    """

    blocks: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Probed:
    """What a prompt would find in the cache: tokens, and the hashes of the whole blocks."""

    cached_tokens: int
    block_digests: tuple[str, ...]  # hexadecimal; see kvstore/tokens.py


INTERVAL_SECONDS = 10.0
WINDOWS_SECONDS = (60, 300, 900)
KEPT = int(WINDOWS_SECONDS[-1] / INTERVAL_SECONDS) + 1
"""One more than the longest window has, because it begins within an interval."""


@dataclass(frozen=True, slots=True)
class RecentHits:
    """Prompt tokens that were looked up in the last so many seconds, and those found."""

    seconds: int
    queried_tokens: int
    hit_tokens: int

    @property
    def share(self) -> float | None:
        """None where nothing was looked up."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else None


@dataclass(frozen=True, slots=True)
class HitCount:
    """Both counters, since start, at a time of the loop's clock."""

    seconds: float
    queried_tokens: int
    hit_tokens: int


START = HitCount(0.0, 0, 0)


@dataclass(frozen=True, slots=True)
class HitRecord:
    """The counters as last noted, and as they were left in each interval before.

    A value: the engine thread replaces it, and any thread reads it.
    """

    past: tuple[HitCount, ...] = ()  # oldest first, one an interval at most
    last: HitCount = START

    def noted(self, count: HitCount) -> "HitRecord":
        """A record with one more count, later than all others."""
        if count.seconds // INTERVAL_SECONDS == self.last.seconds // INTERVAL_SECONDS:
            return HitRecord(self.past, count)
        return HitRecord((*self.past[1 - KEPT :], self.last), count)

    def recent(self, now: float) -> Iterator[RecentHits]:
        """The hits of each window, which is up to an interval longer than it says."""
        for seconds in WINDOWS_SECONDS:
            before = self._at(now - seconds)
            queried = self.last.queried_tokens - before.queried_tokens
            yield RecentHits(seconds, queried, self.last.hit_tokens - before.hit_tokens)

    def _at(self, seconds: float) -> HitCount:
        """The last count from then or before. It holds until the next count."""
        counts = (*self.past, self.last)
        return next((count for count in reversed(counts) if count.seconds <= seconds), START)


@dataclass(frozen=True, slots=True)
class MemoryPromise:
    """The prediction by which the model was found to fit. Bytes."""

    weights: int
    storage: int  # arenas, and as many states as there may be
    workspace: int  # of a step, and what the process grows by
    cache: int  # what MLX's buffer cache keeps in addition: 0 where it gives that up for a step

    @property
    def kept(self) -> int:
        """What is in use between steps."""
        return self.weights + self.storage

    @property
    def total(self) -> int:
        return self.kept + self.workspace + self.cache


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """The first three are of MLX's allocator, `active` and `peak` without what it had given out
    before the model. Bytes.
    """

    active: int
    cached: int  # unused buffers, kept for the next step
    peak: int  # of `active`, since the model was loaded
    resident: int  # of the whole process, as the system counts
    promise: MemoryPromise


DISK_FAULTS = tuple(fault.value for fault in Fault)
"""Why a disk cache may fail to read or to write."""


@dataclass(frozen=True, slots=True)
class DiskCacheStats:
    """The tier below the arena at one moment; counted since start are those from `read_bytes` on.

    `hits` are prompts of which something was loaded: `loaded_tokens` in `load_seconds`, from the
    decision to read to the last block. `failures` are of reading and writing; those of DISK_FAULTS
    that there were. `ended_threads` should run and do not, until the engine is started again.
    """

    entries: int  # blocks, and ends of prompts within one
    used_bytes: int  # of this model's files
    shared_bytes: int  # of all models' files, which the limit is for
    limit_bytes: int
    buffered_bytes: int  # handed over and not yet written
    read_bytes: int
    written_bytes: int
    hits: int
    loaded_tokens: int
    load_seconds: float
    failures: Mapping[str, int]
    ended_threads: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CacheStats:
    """The store at one moment. A block is free, cached (only the tree holds it) or held."""

    block_size: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    blocks_held: int
    blocks_shared: int  # in two tables or more; counted in blocks_held too
    blocks_saved: int  # that there would be besides if each table had copies of its own
    saved_bytes: int  # of these, and of what windows and states share
    arena_bytes: int
    nodes: int
    queried_tokens: int
    hit_tokens: int
    evictions: int
    tail_hit_tokens: int  # adopted beyond whole blocks, at every admission
    prefix_copies: int  # blocks copied because a prompt goes on within what it has adopted
    fork_copies: int  # and because outputs of one prompt do
    groups: tuple[GroupStats, ...] = ()  # windows and states, in slots
    recent_hits: tuple[RecentHits, ...] = ()
    disk: DiskCacheStats | None = None  # None without a disk cache


@dataclass(frozen=True, slots=True)
class SequenceCounts:
    """All sequences that callers have asked for, and what became of them, since start.

    `received` is the sum of `refused`, `finished` and those that still live.
    """

    received: int
    refused: Mapping[RefusalReason, int]
    finished: Mapping[FinishReason, int]

    @property
    def live(self) -> int:
        """Asked for and not over yet."""
        return self.received - sum(self.refused.values()) - sum(self.finished.values())


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """What was drafted from one source, and verified. Each accepted token is a step that its
    sequence did not wait for.
    """

    drafts: int = 0  # each of one row, in one step
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    def plus(self, drafted_tokens: int, accepted_tokens: int) -> "DraftCounts":
        """With one draft more, of so many tokens."""
        return DraftCounts(
            self.drafts + 1,
            self.drafted_tokens + drafted_tokens,
            self.accepted_tokens + accepted_tokens,
        )


@dataclass(frozen=True, slots=True)
class LoopStats:
    """Gauges and monotonic counters of the engine's loop at one moment of a turn."""

    running: int
    waiting: int
    computed_prompt_tokens: int
    cached_prompt_tokens: int
    generated_tokens: int
    preemptions: int  # for lack of blocks
    client_preemptions: int  # so that another client's sequence could be admitted
    rows_sat_out: int  # by who waited for a mask; a step each
    steps: int
    drafts: Mapping[DraftSource, DraftCounts]  # of each source
    hits: HitRecord
    n_contradictions: int  # found by recounting the store while the engine was idle
    first_tokens: int  # sequences that have begun to be generated
    first_token_seconds: float  # from arrival to first token, of all of them together
    cache: CacheStats


@dataclass(frozen=True, slots=True)
class ProcessStats:
    """What an engine's process knows: what its loop last published, and its memory as of now."""

    loop: LoopStats
    memory: MemoryStats


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What the callers know, as of now, and what the engine's process does."""

    sequences: SequenceCounts
    loop: LoopStats
    memory: MemoryStats


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """One live sequence, for the admin API."""

    request_id: str
    index: int
    waits_for: WaitReason | None  # None where it runs
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    output_tokens: int
    blocks: int
    accepted_draft_tokens: int = 0  # of the output's, those that a draft had right


@dataclass(frozen=True, slots=True)
class MachineReport:
    """What the machine offers the configured model; the answer of `rootstock doctor`."""

    device: str  # "cpu" or "gpu", with its name
    memory_bytes: int
    left_bytes: int  # not in use now
    blas: str  # which BLAS runs, for Linux CPUs; "" elsewhere
    advice: str  # what to install for a faster one; "" when nothing
    mlx_version: str
    mlx_lm_version: str
    model: str
    weight_bytes: int  # as they will be in memory; 0 with a problem
    arena_tokens: int  # what the KV budget comes to for this model; 0 with a problem
    arena_bytes: int
    problem: str  # why the model cannot be served here; "" when it can
