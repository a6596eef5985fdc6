"""Statistics of the engine, its caches and its memory."""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from operator import add
from typing import Literal, TypeAlias

from engine.values.attention import AttentionTrial
from engine.values.model import ModelCard
from engine.values.output import FinishReason
from engine.values.request import RefusalReason, WaitReason
from kvstore.disk.types import Fault
from kvstore.slots import GroupStats


class DraftSource(StrEnum):
    """The source of a draft."""

    GRAMMAR = "grammar"  # a guide allows no other continuation
    PREDICTION = "prediction"  # the request's own
    TREE = "tree"  # what the prefix cache has after the same tokens
    OWN = "own"  # the request's prompt and output, where they repeat
    ANSWERS = "answers"  # other outputs of the namespace
    MODEL = "model"  # the draft model


class CacheTier(StrEnum):
    """A tier of the cache."""

    MEMORY = "memory"  # the arena
    DISK = "disk"  # below the arena; see DiskCacheConfig


ALL_TIERS = frozenset(CacheTier)


@dataclass(frozen=True, slots=True)
class Cleared:
    """Blocks and bytes of the arena that a cache clear has freed. Entries on disk can no longer be
    found after a clear, and their bytes are freed soon after.
    """

    blocks: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Probed:
    """Tokens of a prompt that are cached, and the hashes of the whole blocks among them."""

    cached_tokens: int
    block_digests: tuple[str, ...]  # hexadecimal; see kvstore/tokens.py


_SHORT_BOUNDS_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_LONG_BOUNDS_SECONDS = (*_SHORT_BOUNDS_SECONDS[2:], 10.0, 30.0, 60.0, 120.0, 300.0)


class Latency(StrEnum):
    """A duration that the engine measures. Each is counted in one histogram."""

    FIRST_TOKEN = "first_token"  # from a request's arrival to its first token
    TOKEN_GAP = "token_gap"  # between two consecutive tokens of a sequence
    REQUEST = "request"  # from a request's arrival to its end
    QUEUE_WAIT = "queue_wait"  # from a request's arrival to its admission
    STEP = "step"  # one step of the engine's loop
    MASK = "mask"  # until the mask of a token of an answer with a grammar is known

    @property
    def bounds_seconds(self) -> tuple[float, ...]:
        """Upper bounds of the buckets of the histogram, in ascending order."""
        is_short = self in {Latency.TOKEN_GAP, Latency.STEP, Latency.MASK}
        return _SHORT_BOUNDS_SECONDS if is_short else _LONG_BOUNDS_SECONDS


@dataclass(slots=True)
class Histogram:
    """Values counted in buckets: a value belongs to the first bound that is not below it. `counts`
    has one count for each bound, and a last one for what exceeds all bounds. The counts are not
    cumulative. The unit of `bounds` and `total` is that of the values.
    """

    bounds: tuple[float, ...]
    counts: list[int]
    total: float = 0.0  # of all values

    @classmethod
    def empty(cls, bounds: tuple[float, ...]) -> "Histogram":
        """A histogram without values."""
        return cls(bounds, [0] * (len(bounds) + 1))

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self.counts)

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def plus(self, other: "Histogram") -> "Histogram":
        """The values of two histograms with the same bounds."""
        counts = list(map(add, self.counts, other.counts))
        return Histogram(self.bounds, counts, self.total + other.total)


Latencies: TypeAlias = Mapping[Latency, Histogram]


def no_latencies() -> dict[Latency, Histogram]:
    """An empty histogram for each latency."""
    return {latency: Histogram.empty(latency.bounds_seconds) for latency in Latency}


@dataclass(frozen=True, slots=True)
class RecentHits:
    """Prompt tokens looked up in the prefix cache in the last `seconds`, and those found."""

    seconds: int
    queried_tokens: int
    hit_tokens: int

    @property
    def share(self) -> float | None:
        """Share of the tokens that were found; None if none were looked up."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else None


def readable_bytes(n_bytes: int) -> str:
    """A size in GiB, or in MiB below that, for a sentence."""
    n_bytes = max(n_bytes, 0)
    return f"{n_bytes / 2**30:.1f} GiB" if n_bytes >= 1 << 30 else f"{n_bytes / 2**20:.0f} MiB"


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """The memory that a model takes while it is loaded, in bytes. The first four fields and the
    last are planned before it is loaded, and do not change.
    """

    weights_bytes: int
    kv_bytes: int  # of the KV cache, windows included
    states_bytes: int  # of as many recurrent states, running and saved, as there may be
    # Reserved for the arrays of the largest step, for buffers that MLX keeps for the next one, and
    # for what the process needs apart from arrays. Most steps take far less.
    workspace_bytes: int
    process_bytes: int  # resident memory of the process now; 0 before the model is loaded
    total_bytes: int  # charged to a memory budget: the plan's sum, or `process_bytes` if it is more
    events_bytes: int = 0  # planned: published blocks and batches of KV events, if there are any

    @property
    def kept_bytes(self) -> int:
        """Planned bytes of the arrays that stay between steps."""
        return self.weights_bytes + self.kv_bytes + self.states_bytes

    @property
    def words(self) -> str:
        """The planned parts for a sentence, without parts that the model does not have."""
        parts = {
            "weights": self.weights_bytes,
            "KV cache": self.kv_bytes,
            "recurrent states": self.states_bytes,
            "computing": self.workspace_bytes,
            "KV events": self.events_bytes,
        }
        return ", ".join(f"{name} {readable_bytes(size)}" for name, size in parts.items() if size)


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """A model's memory, and in bytes what MLX's allocator counts. `active` and `peak` exclude what
    was allocated before the model was loaded.
    """

    model: ModelMemory
    active: int
    cached: int  # unused buffers, kept for the next step
    peak: int  # of `active`, since the model was loaded
    states: int = 0  # bytes of recurrent states, running and saved, as of now
    arrays: int = 0  # kept between steps, each in a buffer: weights, KV cache and states
    most_arrays: int = 0  # buffers that the device allows a process; 0: it states no limit


@dataclass(frozen=True, slots=True)
class DecodeStats:
    """The path of steady decodes, "compiled" or "eager", with the reason in `why`.

    `steps` counts all steps since the start, `compiled_steps` those that a compiled function took.
    `problem` is the failure because of which decodes are eager, or empty.

    `attention_problem` is the failure because of which attention is `gather`, or empty, and
    `attention_fallbacks` counts the forwards and steps that were computed again with it.
    """

    why: str
    steps: int
    compiled_steps: int
    problem: str = ""
    attention_problem: str = ""
    attention_fallbacks: int = 0


DISK_FAULTS = tuple(fault.value for fault in Fault)
"""Reasons for which a disk cache fails to read or to write."""


@dataclass(frozen=True, slots=True)
class DiskCacheStats:
    """The disk cache at one moment. The fields from `read_bytes` on count since the start.

    `hits` counts loads that brought something, whole or not: `loaded_tokens` in `load_seconds`,
    from the decision to read to the last block. `failures` counts the faults of reading and writing
    that have happened, by the names in DISK_FAULTS. The last three fields are states of now.
    """

    entries: int  # blocks, and ends of prompts within one
    used_bytes: int  # of this model's files
    shared_bytes: int  # of all models' files, to which the limit applies
    limit_bytes: int
    buffered_bytes: int  # queued for writing
    read_bytes: int
    written_bytes: int
    hits: int
    loaded_tokens: int
    load_seconds: float
    given_up_loads: int  # because the disk delivered nothing for seconds
    evicted_entries: int
    refused_entries: int  # accepted, and not written for lack of space or of today's budget
    failures: Mapping[str, int]
    write_fault: str | None  # why the last write failed; None if it did not
    is_day_spent: bool  # nothing is written before tomorrow (UTC)
    ended_threads: tuple[str, ...]  # that should run; only another start brings them back


@dataclass(slots=True)
class KVEventStats:
    """What has been published for routers. All but the first two fields count since the start."""

    subscribers: int = 0  # connected now
    blocks: int = 0  # that are published now: those of the tree, without prompts with a salt
    batches: int = 0  # each a message
    dropped_blocks: int = 0  # not sent because too many waited; all were then published anew
    published_again: int = 0  # publications of all blocks, for new subscribers
    replays: int = 0  # requests for batches that were lost


@dataclass(frozen=True, slots=True)
class CacheStats:
    """The KV store at one moment. A block is free, cached (only the tree holds it) or held."""

    block_size: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    blocks_held: int
    blocks_pinned: int  # kept from eviction by pins; included in blocks_held
    blocks_shared: int  # in two tables or more, of which a pin is one; included in blocks_held
    blocks_saved: int  # additional blocks that would be needed if no tables shared any
    saved_bytes: int  # of these blocks, and of the slots of windows and states that are shared
    arena_bytes: int
    nodes: int  # of the prefix tree
    queried_tokens: int  # prompt tokens looked up, counted at a sequence's first admission
    hit_tokens: int  # prompt tokens found, counted at a sequence's first admission
    warmed_tokens: int  # prompt tokens computed in the background, looked up for no client
    evictions: int
    tail_hit_tokens: int  # adopted beyond whole blocks, counted at every admission
    prefix_copies: int  # blocks copied because a prompt goes on within an adopted block
    fork_copies: int  # blocks copied because outputs of one prompt share them
    groups: tuple[GroupStats, ...]  # windows and states, in slots
    recent_hits: tuple[RecentHits, ...]
    disk: DiskCacheStats | None  # None without a disk cache


@dataclass(frozen=True, slots=True)
class SequenceCounts:
    """All sequences that callers have requested since the start, by outcome.

    `received` is the sum of `refused`, `finished` and the live sequences.
    """

    received: int = 0
    refused: Mapping[RefusalReason, int] = field(default_factory=dict)
    finished: Mapping[FinishReason, int] = field(default_factory=dict)

    @property
    def live(self) -> int:
        """Sequences that were requested and have not ended yet."""
        return self.received - sum(self.refused.values()) - sum(self.finished.values())


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Verified drafts of one source. Each accepted token saves its sequence a step."""

    drafts: int = 0  # each of one row, in one step
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(slots=True)
class DraftModelStats:
    """What a draft model has computed since the start, and the blocks of its store now."""

    drafted_tokens: int = 0  # verified or not
    known_tokens: int = 0  # that sequences had already, and whose KV it lacked
    cached_tokens: int = 0  # of these sequences, whose KV its store had
    failures: int = 0  # 1: it is not used any more
    blocks_total: int = 0
    blocks_held: int = 0  # by sequences


@dataclass(frozen=True, slots=True)
class ImageStats:
    """Images of prompts. The first two fields count since the start."""

    encoded: int  # images that the vision tower has computed, not those whose KV was cached
    reused: int  # requests that found an image's features, kept or being computed
    feature_bytes: int  # of the features that are kept now
    limit_bytes: int  # of all features


@dataclass(frozen=True, slots=True)
class RankStats:
    """What rank 0 of a model of several ranks has sent to the others since the start."""

    ranks: int  # of the model, rank 0 included
    sent_seconds: float  # of the engine thread, until the kernel had taken the bytes
    sent_bytes: int  # to all of them together


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges, and counters since the start, read at one moment.

    The engine's process sends all fields but `sequences`, which the server's end of the connection
    counts and adds.
    """

    running: int
    waiting: int
    computed_prompt_tokens: int
    generated_tokens: int
    preemptions: int  # for lack of blocks
    client_preemptions: int  # so that another client's sequence could be admitted
    recomputed_sequences: int  # because a step of theirs, or the storage, was lost
    late_rows: int  # rows not sampled in a step because their mask was not known yet
    steps: int
    drafts: Mapping[DraftSource, DraftCounts]
    contradictions: int  # found by recounting the store while the engine was idle
    latencies: Latencies
    cache: CacheStats
    memory: MemoryStats
    decode: DecodeStats | None = None  # None: of an engine that computes nothing
    kv_events: KVEventStats | None = None  # None: they are not published
    draft_model: DraftModelStats | None = None  # None: there is none
    images: ImageStats | None = None  # None: the model takes none
    ranks: RankStats | None = None  # None: one process computes all of the model
    sequences: SequenceCounts = field(default_factory=SequenceCounts)


UNSALTED_ID = "0"
"""The id of the namespace of prompts without an adapter and without a salt."""


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """A live sequence, for the admin API and for pictures of the cache."""

    request_id: str
    index: int  # which of the request's n sequences
    waits_for: WaitReason | None  # None while it runs
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    output_tokens: int
    blocks: int
    accepted_draft_tokens: int = 0  # output tokens that a draft predicted
    namespace: str = UNSALTED_ID
    node: int | None = None  # the node of the tree with the last of its indexed blocks

    @property
    def id(self) -> str:
        """The request's id, with `#` and the index after it unless the index is 0."""
        return f"{self.request_id}#{self.index}" if self.index else self.request_id

    @property
    def state(self) -> Literal["waiting", "loading", "running"]:
        """The state of the sequence. A loading sequence waits for a load from disk."""
        if self.waits_for is None:
            return "running"
        return "loading" if self.waits_for is WaitReason.DISK else "waiting"


@dataclass(frozen=True, slots=True)
class ArrayCounts:
    """How many arrays a model will keep between steps. Each takes a buffer, of which Metal allows a
    process a number.
    """

    fixed: int  # of the weights and of the KV cache
    of_state: int  # of one recurrent state; 0: no layer is recurrent
    states: int  # states that there may be, running and saved
    state_tokens: int  # of a long prompt, from one saved state to the next
    most: int  # that the device allows


@dataclass(frozen=True, slots=True)
class MachineReport:
    """The machine as seen by the configured model, for `rootstock doctor`. `card` and `memory` are
    None if the model cannot be served.
    """

    memory_bytes: int
    left_bytes: int  # not in use now
    advice: str  # what to install for a faster BLAS; "" if nothing is
    mlx_version: str
    mlx_lm_version: str
    images: str = ""  # the packages for images, or the command that installs them
    problem: str = ""  # why the model cannot be served here; "" when it can
    card: ModelCard | None = None  # as far as it is known before the weights are read
    memory: ModelMemory | None = None  # what the model will take
    attention: tuple[AttentionTrial, ...] = ()  # what comparisons on this device have found
    arrays: ArrayCounts | None = None  # None where the device states no limit of buffers
