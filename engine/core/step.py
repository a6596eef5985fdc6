"""What scheduler and backend exchange: plans, results, and the runner's protocol."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import add
from typing import Any, NamedTuple, NewType, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from engine.values.model import ModelCard, Tokenizer
from engine.values.output import TokenLogprob
from engine.values.request import Pooling, SamplingParams
from engine.values.stats import MemoryStats
from kvstore.ops import (
    FillBlock,
    FillState,
    FillWindow,
    Parts,
    ReadBlock,
    StorageOp,
    TablePatch,
)
from kvstore.sizes import StorageBytes, StorageSizes

SequenceId = NewType("SequenceId", int)
"""A sequence's id for as long as the engine runs. Never used twice; later ones are higher."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a sequence's tokens are chosen, as of when it enters the batch.

    The draw depends on (seed, output index) and on the row's own logits alone, so a preempted
    sequence that comes back draws what it would have drawn.
    """

    params: SamplingParams
    seed: int
    output_index: int = 0  # how many tokens it has generated before it entered
    prompt_tokens: tuple[int, ...] = ()  # for repetition_penalty; empty when it is off
    output_tokens: tuple[int, ...] = ()  # for penalties; empty when all are off
    banned_tokens: tuple[int, ...] = ()  # ruled out before `min_tokens`, where no mask says more


@dataclass(frozen=True, slots=True)
class BatchEntry:
    """A sequence enters the batch. Its tables come as patches, its first tokens in chunks."""

    sequence_id: SequenceId
    sampling: Sampling
    adapter: str = ""  # with which its tokens are computed; "": none


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one sequence to compute: positions [start, start + len(tokens)).

    The last `n_drafts` are no tokens of it yet, but drafts of what it will sample. With drafts it
    samples, and does so behind the token before the first of them and behind each. What it samples
    counts as long as it equals the drafts; the first token that does not is the last that counts.
    """

    sequence_id: SequenceId
    start: int
    tokens: tuple[int, ...]  # at least one
    samples: bool  # a token is sampled after the last one
    n_drafts: int = 0
    prompt_logprobs: int | None = None  # score each of `next_tokens`, with so many alternatives
    next_tokens: tuple[int, ...] = ()  # with prompt_logprobs: the token that follows tokens[i]
    pooling: Pooling | None = None  # which of these tokens' hidden states are pooled


class StepWork(NamedTuple):
    """What one step computes, in the counts by which its time is predicted."""

    forwards: int = 0  # one for all decodes, one for each chunk of a prompt
    decode_rows: int = 0
    decode_keys: int = 0  # positions that the decodes attend to, over all rows
    prompt_tokens: int = 0
    prompt_keys: int = 0  # positions that the prompts' tokens attend to, over all tokens
    gathered_keys: int = 0  # positions up to the end of each chunk, however few its tokens are
    verifications: int = 0  # one for all drafts of the step, which is collected before the next
    draft_tokens: int = 0

    def plus(self, more: "StepWork") -> "StepWork":
        return StepWork(*map(add, self, more))


def chunk_work(start: int, n_tokens: int) -> StepWork:
    """Positions [start, start + n_tokens) of a prompt, computed in a forward of their own."""
    attended = n_tokens * start + n_tokens * (n_tokens + 1) // 2
    return StepWork(1, 0, 0, n_tokens, attended, start + n_tokens)


def chunk_beginning(start: int) -> StepWork:
    """The work of a chunk from that position on that does not depend on its length."""
    return StepWork(forwards=1, gathered_keys=start)


def draft_work(start: int, n_tokens: int) -> StepWork:
    """What a draft of so many tokens adds behind the decode of the token at position `start`: the
    keys of all are gathered, in place of the decode's.
    """
    n = n_tokens
    attended = (1 + n) * start + (1 + n) * (2 + n) // 2
    return StepWork(
        decode_keys=-(start + 1), prompt_keys=attended, gathered_keys=start + 1 + n, draft_tokens=n
    )


VERIFICATION = StepWork(verifications=1)
"""What it takes beside that to verify the drafts of a step."""

NO_WORK = StepWork()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step, in the order in which it is carried out.

    `decodes` are sequences that compute the token which they sampled last, and sample the next.
    `kept` compute nothing: they sample from the logits of an earlier step that they sat out.
    """

    leave: tuple[SequenceId, ...] = ()  # out of the batch, before anybody enters
    enter: tuple[BatchEntry, ...] = ()
    patches: tuple[tuple[SequenceId, TablePatch], ...] = ()
    before: tuple[StorageOp, ...] = ()  # carried out before anything is written
    chunks: tuple[Chunk, ...] = ()
    after_chunks: tuple[StorageOp, ...] = ()  # carried out behind the chunks
    decodes: tuple[SequenceId, ...] = ()
    after: tuple[StorageOp, ...] = ()  # carried out behind all that is written
    work: StepWork = NO_WORK  # by which its time was predicted
    reads: tuple[ReadBlock, ...] = ()  # carried out last
    number: int = 0  # the step's id for its planner
    kept: tuple[SequenceId, ...] = ()

    @property
    def is_due(self) -> bool:
        """Whether the step has anything to do. Changes of the batch alone can wait for the next."""
        ops = self.before or self.after_chunks or self.after
        return bool(self.chunks or self.decodes or self.kept or ops or self.reads)

    @property
    def is_drafted(self) -> bool:
        """Whether there are drafts in it: how far sequences go on is known when it is collected."""
        return self.work.draft_tokens > 0

    @property
    def is_scoring(self) -> bool:
        """Whether prompt logprobs are computed."""
        return any(chunk.prompt_logprobs is not None for chunk in self.chunks)

    @property
    def is_filling(self) -> bool:
        """Whether it fills in blocks or states from disk."""
        fills = FillBlock | FillWindow | FillState
        return any(isinstance(op, fills) for op in self.before)

    def rows(self) -> Iterator[tuple[SequenceId, int]]:
        """The sequences that the step is for, each with how many of its tokens it computes, without
        drafts.
        """
        for chunk in self.chunks:
            yield chunk.sequence_id, len(chunk.tokens) - chunk.n_drafts
        for sequence_id in self.decodes:
            yield sequence_id, 1
        for sequence_id in self.kept:
            yield sequence_id, 0

    def sampling(self) -> Iterator[SequenceId]:
        """The sequences that sample a token."""
        for chunk in self.chunks:
            if chunk.samples:
                yield chunk.sequence_id
        yield from self.decodes
        yield from self.kept


Masks: TypeAlias = npt.NDArray[np.int32]
"""Which tokens some rows may choose from, `[rows, ceil(vocabulary / 32)]`: token t of a row is bit
t % 32, from the lowest, of word t // 32.
"""


NO_MASKS: Masks = np.zeros((0, 0), dtype=np.int32)


@dataclass(frozen=True, slots=True)
class StepMasks:
    """The masks of some of a step's sampling rows; the others may choose any token.

    A sequence with drafts comes once for each of its draws, in order. Those without a mask
    do not take place, but for a sequence that has no masks at all.
    Those that are `late` have none yet: they sit the step out, and the logits behind their last own
    token are kept.
    """

    sequence_ids: Sequence[SequenceId] = ()
    masks: Masks = field(default_factory=lambda: NO_MASKS)
    late: Sequence[SequenceId] = ()


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token that was chosen, with its log-probability where the request asks for any."""

    token_id: int
    logprob: TokenLogprob | None = None


Vector: TypeAlias = npt.NDArray[np.float32]
"""`[dimensions]` of a hidden state, or `[labels]` of what a classifier makes of it."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the runner computed, by sequence, and what it was to read."""

    sampled: Mapping[SequenceId, tuple[SampledToken, ...]]
    """For each row that samples and is not late: one token, or with drafts all that count."""
    scored: Mapping[SequenceId, tuple[TokenLogprob, ...]]  # for rows with prompt_logprobs
    failed: Mapping[SequenceId, str] = field(default_factory=dict)  # rows that failed alone
    read: tuple[Parts, ...] = ()  # one for each of the plan's reads
    pooled: Mapping[SequenceId, Vector] = field(default_factory=dict)  # summed over a chunk's


class RunnerLost(Exception):
    """The device's memory is in an unknown state: nothing can be computed any more."""


class ModelRunner(Protocol):
    """Computes steps, one while the next is planned. Lives on the engine thread, where it was made.

        submit(1) sample(1) submit(2) collect(1) sample(2) submit(3) collect(2) ...

    A step with drafts is collected before the next one is submitted.

    Each method may raise whatever the device raises. The step for which `submit` or `sample` has
    raised is forgotten, and all are when `collect` has; the blocks of their rows are undefined
    then, all others untouched. Raises RunnerLost when that cannot be said.
    """

    def submit(self, plan: StepPlan) -> None:
        """Change the batch, and have the forwards begun. Returns while they are, or wait.

        A decode's token may still be on its way: the device has it before the host does. What the
        plan fills in and reads may have to wait for the step in flight.
        """
        ...

    def sample(self, masks: Callable[[], StepMasks]) -> None:
        """Have the step that was submitted last computed, and have it sample, now that the one
        before is collected. Returns while it computes. What `masks` raises is raised.
        """
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest step that has not been collected, and for what it reads."""
        ...


@dataclass(frozen=True, slots=True)
class Backend:
    """All that the engine needs of a loaded model."""

    runner: ModelRunner
    card: ModelCard
    tokenizer: Tokenizer
    hf_tokenizer: Any  # transformers' fast tokenizer
    sizes: StorageSizes
    bytes: StorageBytes
    kv_format: str  # how the bytes lie that a step reads, of each part `part_bytes`
    software: str  # whose numbers these bytes are
    part_bytes: tuple[int, ...]  # of a block, of each window's block, of a state
    memory: Callable[[], MemoryStats]  # on any thread
    release_thread: Callable[[], None]  # gives back what MLX keeps for the thread; its last act
