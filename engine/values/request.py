"""A request to the engine: its prompt, its sampling, its constraints. Frozen values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from engine.values.images import Image
from engine.values.tokens import NO_TOKENS, PackedTokens


class RefusalReason(StrEnum):
    """Why a request was refused."""

    INVALID = "invalid"  # InvalidRequest: it can never be served as it stands
    QUEUE_FULL = "queue_full"  # QueueFull
    STOPPED = "stopped"  # EngineStopped


class WaitReason(StrEnum):
    """Why a sequence has not been admitted."""

    SLOTS = "slots"  # as many run as may
    MEMORY = "memory"  # too few blocks are free or evictable
    TWIN = "twin"  # another computes what it could adopt
    DISK = "disk"  # what it could adopt is being loaded, or other loads go first
    TURN = "turn"  # the step has no time or tokens left for it


class Pooling(StrEnum):
    """Which of a prompt's hidden states after the model's last norm form its vector."""

    LAST = "last"  # that of its last token
    MEAN = "mean"  # the mean of all
    FIRST = "first"  # that of its first token


@dataclass(frozen=True, slots=True)
class Xtc:
    """XTC ("exclude top choices"): with this probability a draw leaves out all tokens that are
    above the threshold, but for the least likely of them and the `protected` ones.
    """

    probability: float
    threshold: float
    protected: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Dry:
    """DRY: a token that would continue a repetition of n tokens, at least `allowed_length`, loses
    multiplier * base ^ (n - allowed_length).

    `penalty_last_n` is how many of the last tokens of prompt and output are searched, -1 for all.
    No repetition goes past one of the `breakers`, each a sequence of tokens.
    """

    multiplier: float
    base: float = 1.75
    allowed_length: int = 2
    penalty_last_n: int = -1
    breakers: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters. The defaults leave the model's distribution unchanged.

    Order of application: logit_bias, penalties and DRY on the logits, then the tokens that are
    ruled out, then temperature, top_k, top_p, min_p, XTC. Log-probabilities that are reported come
    from the logits before any of these.
    """

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: frozenset[int] | None = None  # only these are sampled; None: any
    bad_words: tuple[tuple[int, ...], ...] = ()  # sequences of tokens that the output never has
    seed: int | None = None  # None: the engine draws one
    top_logprobs: int | None = None  # None: none; 0: the chosen token's alone
    logprob_token_ids: tuple[int, ...] = ()  # with top_logprobs: reported in place of the likeliest
    min_tokens: int = 0  # no stop token is sampled before
    xtc: Xtc | None = None
    dry: Dry | None = None


class GrammarKind(StrEnum):
    """The notation of a grammar."""

    JSON_SCHEMA = "json_schema"  # the schema as JSON text
    REGEX = "regex"  # Rust's syntax, matched as a whole
    LARK = "lark"  # llguidance's dialect; `<[7]>` is the token with id 7
    GBNF = "gbnf"  # llama.cpp's, which SGLang calls EBNF; its rule `root` is the whole


MAX_GRAMMAR_CHARACTERS = {
    GrammarKind.JSON_SCHEMA: 256 * 1024,
    GrammarKind.REGEX: 32 * 1024,
    GrammarKind.LARK: 32 * 1024,
    GrammarKind.GBNF: 32 * 1024,
}


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that a run of tokens must match."""

    kind: GrammarKind
    text: str

    @property
    def too_long(self) -> str | None:
        """Why it is not tried, in words for a client; None where it is short enough."""
        n_characters, most = len(self.text), MAX_GRAMMAR_CHARACTERS[self.kind]
        if n_characters <= most:
            return None
        return f"the grammar has {n_characters} characters; {most} are the most"


@dataclass(frozen=True, slots=True)
class ThinkingBlock:
    """Free text up to an `end` marker, which may precede the text of a grammar.

    It begins with the `begin` marker, whose first token no text of the grammar begins with; if
    `begin` is empty, the block is already open. One of the tokens of white `space` may follow it.
    """

    begin: tuple[int, ...]
    end: tuple[int, ...]
    space: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Constraint:
    """A grammar for what a sequence generates.

    It holds from the first token on, or behind a `thinking` block, or where the marker `behind` has
    been generated, within the block not looked for; what comes before is free. Where it is
    fulfilled, and nothing may follow, the sequence ends; with `repeats` it is free until the marker
    comes again. `spellings` are other tokens that mean the same as `behind`. `instead` may come in
    its place.

    Where the grammar is refused, the first of the `weaker` ones that is not holds. None is no
    grammar: then the sequence is free, also where a grammar turns out later to be too costly.
    """

    grammar: Grammar
    param: str  # the field that asks for it, for errors
    thinking: ThinkingBlock | None = None
    behind: tuple[int, ...] = ()
    repeats: bool = False
    instead: "Alternative | None" = None
    weaker: tuple[Grammar | None, ...] = ()
    spellings: frozenset[tuple[int, ...]] = frozenset()


@dataclass(frozen=True, slots=True)
class Alternative:
    """Output that is allowed instead of a grammar; the first token selects it.

    That token is `begin`, which takes precedence where a text of the grammar begins with it. All
    that is generated from there on, `begin` included, has a constraint of its own, or is free.
    """

    begin: int
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """Each block has at most `tokens` tokens between the `start` marker and the `end` marker. Then
    what is missing of the end marker is forced.

    If a block `is_open`, generation begins within it. Without `start` that is the only block.
    """

    tokens: int
    start: tuple[int, ...]
    end: tuple[int, ...]
    is_open: bool = False


TEXT_BEFORE_TOKENS = 8
"""How many tokens before an output are looked at to decode its first tokens."""


@dataclass(frozen=True, slots=True)
class Markup:
    """How the text of an answer is marked where it is no content: reasoning and tool calls. Stop
    strings, and stop tokens of the client, count in the content alone.

    `spans` are pairs of a begin and an end marker. An end "" is the end of the text, and an end
    equal to the begin is the begin itself: a marker alone. At the beginning of the content, any of
    `leading` begins a span up to the end of the text. Where the prompt has begun a span, `opened`
    is its end.
    """

    spans: tuple[tuple[str, str], ...] = ()
    leading: tuple[str, ...] = ()
    opened: str = ""


@dataclass(frozen=True, slots=True)
class LoopLimit:
    """When an output that repeats itself ends: after a run of `min_pattern_size` to
    `max_pattern_size` tokens has come `min_count` times in a row, exactly; names as in vLLM.

    Without `min_count` short runs have to come more often: lines of tables, lists of zeros and
    rulers repeat lawfully.
    """

    max_pattern_size: int = 512
    min_pattern_size: int = 1
    min_count: int | None = None

    @property
    def least_tokens(self) -> int:
        """The fewest tokens of a cycle, all its copies together."""
        return 72 if self.min_count is None else max(2, self.min_count * self.min_pattern_size)

    def cycle_tokens(self, period: int) -> int:
        """The number of tokens, all copies together, after which a run of that length is a loop."""
        if self.min_count is not None:
            return self.min_count * period
        copies = max(4, -(-(512 if period < 8 else 256) // period))
        return period * copies


@dataclass(frozen=True, slots=True)
class Request:
    """One validated request. `id` is the server's own and unique for the life of the daemon."""

    id: str
    prompt: PackedTokens
    max_tokens: int  # 0: the prompt is computed, and scored or pooled where that is asked for
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()  # in addition to the model's own
    named_stops: Mapping[int, str] = field(default_factory=dict)  # stop strings that are tokens
    markup: Markup | None = None  # None: all text is content
    loops: LoopLimit | None = None  # None: it may repeat itself until `max_tokens`
    ignore_eos: bool = False
    speculate: bool = True  # tokens may be drafted, which changes no text
    prediction: PackedTokens = NO_TOKENS  # that the output is expected to have, in part
    n: int = 1
    client: str = ""  # who asks: clients take turns in the queue
    priority: int = 0  # lower is admitted first of the client's own, and preempted last of all
    cache_salt: str = ""
    adapter: str = ""  # by its name; "": the model as it is
    prompt_logprobs: int | None = None  # top alternatives for every prompt token
    skip_special_tokens: bool = True  # False: they stay in the text
    text_before: tuple[int, ...] = ()  # the last tokens of a text that the output continues
    constraint: Constraint | None = None
    thinking_budget: ThinkingBudget | None = None
    pooling: Pooling | None = None  # with max_tokens 0: a vector is made of the prompt
    shared_tokens: int | None = None  # of the prompt, that are cached; None: all, and the output
    is_background: bool = False  # computed only while no request is live that is not
    pin: bool = False  # with is_background and max_tokens 0: the prompt is not evicted afterwards
    images: tuple[Image, ...] = ()  # of the prompt, in the order of their positions
    reports_progress: bool = False  # each chunk of the prompt that is computed has an event
