"""What the server and the engine say to each other. Frozen values, no behaviour, no MLX."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Protocol

from annotated_types import Ge, Le

from engine.memory import MemoryStats
from engine.recent import HitRecord, RecentHits
from kvstore.groups.group import GroupStats
from kvstore.tier.types import Fault

DISK_FAULTS = tuple(fault.value for fault in Fault)
"""Why a disk cache may fail to read or to write."""


class RefusalReason(StrEnum):
    """Why a request was not taken in."""

    INVALID = "invalid"  # InvalidRequest: it can never be served as it stands
    QUEUE_FULL = "queue_full"  # QueueFull
    STOPPED = "stopped"  # EngineStopped


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # an end-of-sequence token, a stop string or a grammar that is fulfilled
    LENGTH = "length"  # max_tokens or the context length
    ABORT = "abort"  # the client left, or the daemon stopped
    ERROR = "error"  # the step that computed it raised, or the loop has died


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. The defaults change nothing about the model's distribution.

    Order of application: logit_bias and penalties on the logits, then temperature, top_k, top_p,
    min_p. Log-probabilities that are reported come from the logits before any of these.
    """

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None  # None: the engine draws one
    top_logprobs: int | None = None  # None: none; 0: the chosen token's alone
    min_tokens: int = 0  # no stop token is sampled before


Temperature = Annotated[float, Ge(0), Le(2)]
TopP = Annotated[float, Ge(0), Le(1)]
TopK = Annotated[int, Ge(-1), Le(2**31 - 1)]
MinP = Annotated[float, Ge(0), Le(1)]
RepetitionPenalty = Annotated[float, Ge(0.01), Le(100)]


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What holds where a request is silent. As it stands, the model's own distribution."""

    temperature: Temperature = 1.0  # 0 is greedy
    top_p: TopP = 1.0  # 0 is greedy
    top_k: TopK = 0  # 0 and -1 are off
    min_p: MinP = 0.0
    repetition_penalty: RepetitionPenalty = 1.0


class GrammarKind(StrEnum):
    """How a grammar is written."""

    JSON_SCHEMA = "json_schema"  # the schema as JSON text
    REGEX = "regex"  # Rust's syntax, matched as a whole
    LARK = "lark"  # llguidance's dialect; `<[7]>` is the token with id 7


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a run of tokens must be."""

    kind: GrammarKind
    text: str


@dataclass(frozen=True, slots=True)
class ThinkingBlock:
    """Free text up to an `end` marker, which may come before what a grammar asks for.

    It begins with the `begin` marker, whose first token no text of the grammar begins with; where
    that is empty the block is open already. One of the tokens of white `space` may follow it.
    """

    begin: tuple[int, ...]
    end: tuple[int, ...]
    space: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Constraint:
    """A grammar for what a sequence generates.

    It holds from the first token on, or behind a `thinking` block, or where the marker `behind` has
    been generated; what comes before is free. Where it is fulfilled, and nothing may follow, the
    sequence ends; with `repeats` it is free until the marker comes again. `instead` may come in its
    place.
    """

    grammar: Grammar
    param: str  # the field that asks for it, for errors
    thinking: ThinkingBlock | None = None
    behind: tuple[int, ...] = ()
    repeats: bool = False
    instead: "Alternative | None" = None


@dataclass(frozen=True, slots=True)
class Alternative:
    """What may come in place of what a grammar asks for; the first token tells which it is.

    That token is `begin`, which takes precedence where a text of the grammar begins with it. All
    that is generated from there on, `begin` included, has a constraint of its own, or is free.
    """

    begin: int
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """At most `tokens` between the `start` marker and the `end` marker, which is forced then.

    Without `start` the block is open when generation begins.
    """

    tokens: int
    start: tuple[int, ...]
    end: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Request:
    """One validated request. `id` is the server's own and unique for the life of the daemon."""

    id: str
    prompt: tuple[int, ...]
    max_tokens: int  # 0: score the prompt only
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()  # in addition to the model's own
    ignore_eos: bool = False
    n: int = 1
    client: str = ""  # who asks: clients take turns in the queue
    priority: int = 0  # lower is admitted first of the client's own, and gives way last of all
    cache_salt: str = ""
    prompt_logprobs: int | None = None  # top alternatives for every prompt token
    skip_special_tokens: bool = True  # False: they stay in the text
    text_before: tuple[int, ...] = ()  # whose text the output's goes on; empty: it begins one
    constraint: Constraint | None = None
    thinking_budget: ThinkingBudget | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token with its log-probability (natural logarithm) and the best alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), best first


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens counted for one sequence."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class OutputEvent:
    """News of one sequence: the tokens of a step, the text they complete, or its end.

    `text` may be empty while a character or a possible stop string is incomplete. Exactly one
    event of each sequence has a `finish_reason`; it is the last. One has an `admission`, before all
    that have tokens; a sequence that ends while it waits has none.
    """

    request_id: str
    index: int  # which of the request's n sequences
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None  # first entry None; sent once
    finish_reason: FinishReason | None = None
    stopped_by: str | int | None = None  # with STOP: the stop string, or the stop token's id
    admission: Usage | None = None  # prompt and cached tokens, when it is first admitted
    usage: Usage | None = None  # with finish_reason
    error: str | None = None  # with FinishReason.ERROR
    param: str | None = None  # with `error`: the request's field at fault, where it is the request


@dataclass(frozen=True, slots=True)
class DiskCacheStats:
    """The tier below the arena at one moment; counted since start are those from `read_bytes` on.

    `hits` are prompts of which something was loaded: `loaded_tokens` in `load_seconds`, from the
    decision to read to the last block. `failures` are of reading and writing; those of DISK_FAULTS
    that there were. `ended_threads` should run and do not, until the engine is started again.
    """

    entries: int  # blocks, and ends of prompts within one
    used_bytes: int  # of all files in the folder
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
class LoopStats:
    """Gauges and monotonic counters of the engine's loop at one moment of a turn."""

    running: int
    waiting: int
    computed_prompt_tokens: int
    cached_prompt_tokens: int
    generated_tokens: int
    preemptions: int  # for lack of blocks
    gave_way: int  # for another client's
    rows_sat_out: int  # by who waited for a mask; a step each
    steps: int
    hits: HitRecord
    cache: CacheStats


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What the callers know, as of now, and what the loop last published."""

    sequences: SequenceCounts
    loop: LoopStats
    memory: MemoryStats


class CacheTier(StrEnum):
    """Where KV is kept."""

    MEMORY = "memory"  # the arena
    DISK = "disk"  # below it; see DiskCacheConfig


ALL_TIERS = frozenset(CacheTier)


@dataclass(frozen=True, slots=True)
class Cleared:
    """What a cache clear gave back of the arena. What it removes from disk is gone from sight at
    once, and its bytes are free soon after.
    """

    blocks: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Probed:
    """What a prompt would find in the cache: tokens, and the names of the whole blocks."""

    cached_tokens: int
    block_digests: tuple[str, ...]  # hexadecimal; see kvstore/digest.py


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """One live sequence, for the admin's eyes."""

    request_id: str
    index: int
    status: str
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    output_tokens: int
    blocks: int
    age_seconds: float


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What the server needs to know about the loaded model."""

    name: str  # directory or repository it came from
    fingerprint: str  # short digest of config and weights' identity: system_fingerprint
    vocab_size: int
    max_context_tokens: int
    eos_token_ids: frozenset[int]
    kv_bytes_per_token: int
    arena_tokens: int  # what the whole arena holds
    block_size: int
    device: str  # "cpu" or "gpu", with its name
    dtype: str
    blas: str  # which BLAS runs, for Linux CPUs; "" elsewhere
    sampling: SamplingDefaults = SamplingDefaults()

    @property
    def max_sequence_tokens(self) -> int:
        """The most tokens of one sequence, prompt and answer."""
        return min(self.max_context_tokens, self.arena_tokens)


@dataclass(frozen=True, slots=True)
class Replay:
    """An answer as it was generated, for when it comes back in a conversation.

    `opened` + the text of `tokens` is `opened` + `thinking` + content and calls.
    """

    tokens: tuple[int, ...]  # without the stop token
    opened: str = ""  # of the reasoning, by the prompt that was answered: "<think>\n"
    thinking: str = ""  # the text up to the end of the reasoning, markers included
    reasoning: str = ""  # what of it the client was sent as reasoning


NO_REPLAYS: Mapping[int, Replay] = MappingProxyType({})


class Tokenizer(Protocol):
    """Text to token ids and back. Safe to call from several threads, and lets others run.

    `encode` and `apply_chat_template` raise PromptTooLong for texts that are far beyond what a
    sequence may have; others may still have a few tokens more.
    """

    @property
    def chat_template(self) -> str:
        """Its source; "" where the model has none."""
        ...

    @property
    def added_tokens(self) -> Mapping[str, int]:
        """Tokens that are more than pieces of text: markers, beginnings and ends. Text to id."""
        ...

    @property
    def special_tokens(self) -> Collection[str]:
        """Those of the added tokens that are no text: answers leave them out unless asked."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text. Control tokens in it count as such."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the tokens, special tokens included."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of one token, half characters included."""
        ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        replays: Mapping[int, Replay] = NO_REPLAYS,
        /,
        **template_arguments: object,
    ) -> list[int]:
        """Token ids of a conversation, ready for the assistant's turn.

        Control tokens count as such where the template wrote them. In `messages` and
        `template_arguments` they are text.

        `replays` are by the index of their message, which must say the same. Their tokens stand
        where the template writes the message with all its reasoning; elsewhere it is rendered as
        any other.

        Raises ValueError when the model has no template or the template refuses the messages.
        """
        ...


class DiskWrites(StrEnum):
    """What of the cache goes to disk."""

    SELECTIVE = "selective"  # long prefixes that are shared, idle or about to be evicted
    ALL = "all"  # every block, as soon as it is computed
    EXIT = "exit"  # nothing before shutdown


@dataclass(frozen=True, slots=True)
class DiskCacheConfig:
    """A folder for what the arena loses. One daemon a folder."""

    directory: Path
    max_bytes: int  # of all files together; at least 16 MiB
    write: DiskWrites = DiskWrites.SELECTIVE
    daily_bytes: int | None = None  # the most that is written in a day of UTC; None: no limit
    shutdown_seconds: float = 10.0  # for writing what is still to be, at the end
    salted: bool = False  # write prompts that have a cache_salt, too


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything the engine is told at start. Validated by the server's settings."""

    model: str  # a directory, a Hugging Face repository, or "" for the embedded default
    kv_cache_bytes: int | None = None  # None: a share of what the machine has left
    block_size: int = 32  # tokens
    max_running: int = 32  # sequences computed in one step
    max_waiting: int = 1024  # sequences queued; of one client at most as many as places are free
    step_tokens: int = 512  # tokens computed in one step
    max_prompt_share: float = 0.75  # of a step's time beside decodes; 1: no limit
    prefix_cache: bool = True
    attention: str = "auto"  # "auto", "gather" or "cascade"
    state_cache_bytes: int | None = None  # for saved recurrent states; None: a quarter of the KV's
    generation_config: str = "auto"  # "auto" or "none": where sampling defaults come from
    disk: DiskCacheConfig | None = None


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
