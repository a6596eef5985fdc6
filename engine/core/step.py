"""What the scheduler gives the runner and what it gets back: rows, their results, and the runner.

A step plan is a list of rows and one ordered list of storage ops. The runner answers each row with
one result, in the order of the rows. All of it are plain values that can be pickled and replayed.

The runner keeps the batch between steps: for each sequence its tables, its position, how it is
sampled and the token that it sampled last. A plan says what changes in the batch and which of its
sequences compute something. A step is planned while the one before it is computed, except after a
step with drafts, or where drafts of the next step would gain more than the overlap.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NewType, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from engine.values.model import ModelCard, Tokenizer
from engine.values.output import TokenLogprob
from engine.values.request import Pooling, SamplingParams
from engine.values.stats import DecodeStats, MemoryStats
from kvstore.ops import Parts, ReadBlock, StepOp, StorageOp, TablePatch, When
from kvstore.sizes import StorageBytes, StorageSizes

SequenceId = NewType("SequenceId", int)
"""Identifies a sequence for as long as the engine runs. Never used twice; later ones are higher."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a sequence's tokens are chosen, as of when it enters the batch.

    A draw depends on the seed, on the token's index in the output and on the row's own logits
    alone: a sequence that was preempted draws again what it has drawn before.
    """

    params: SamplingParams
    seed: int
    output_index: int = 0  # tokens that it has generated before it enters
    prompt_tokens: tuple[int, ...] = ()  # for repetition_penalty; empty when it is off
    output_tokens: tuple[int, ...] = ()  # for penalties; empty when all are off
    banned_tokens: tuple[int, ...] = ()  # ruled out before `min_tokens`, where no mask says more


@dataclass(frozen=True, slots=True)
class BatchEntry:
    """A sequence that enters the batch. Its tables follow as patches, its tokens as rows."""

    sequence_id: SequenceId
    sampling: Sampling
    adapter: str = ""  # the LoRA with which its tokens are computed; "": none


class Score(NamedTuple):
    """A prefill row also computes the log-probability of the token after each of its tokens."""

    next_tokens: tuple[int, ...]  # after each of the row's tokens; none after a prompt's last
    n_top: int  # alternatives reported for each


class Prefill(NamedTuple):
    """Compute known tokens of a sequence: positions [start, start + len(tokens)).

    These are tokens of its prompt, or tokens that are computed again after a preemption or after a
    draft was rejected.
    """

    sequence_id: SequenceId
    start: int
    tokens: tuple[int, ...]
    samples: bool = False  # a token is sampled after the last one
    score: Score | None = None
    pooling: Pooling | None = None  # which of these tokens' hidden states are pooled


class Decode(NamedTuple):
    """Compute the last sampled token, which the device has, and sample the next."""

    sequence_id: SequenceId


class Verify(NamedTuple):
    """Compute the last sampled token `token` at position `start` and a draft after it.

    A token is sampled after `token` and after each token of the draft. Those that equal the draft
    are accepted; the first that differs, or the one after the whole draft, is the last that counts.
    """

    sequence_id: SequenceId
    start: int
    token: int
    draft: tuple[int, ...]


class Resample(NamedTuple):
    """Sample from the logits that an earlier step has saved because the row's mask was late."""

    sequence_id: SequenceId


Row: TypeAlias = Prefill | Decode | Verify | Resample


@dataclass(slots=True)
class StepPlan:
    """One step for the runner. Filled by the scheduler, and not changed once it is submitted."""

    number: int = 0  # identifies the step for its planner
    leave: Sequence[SequenceId] = ()  # out of the batch, before any sequence enters
    enter: list[BatchEntry] = field(default_factory=list)
    patches: list[tuple[SequenceId, TablePatch]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)  # at most one of each sequence
    ops: Sequence[StepOp] = ()  # in the order in which the store has queued them

    def ops_at(self, when: When) -> list[StorageOp]:
        """The ops of one phase of the step, without reads."""
        return [op for at, op in self.ops if at is when and not isinstance(op, ReadBlock)]

    @property
    def reads(self) -> list[ReadBlock]:
        """What the step reads, after all else."""
        return [op for _, op in self.ops if isinstance(op, ReadBlock)]


Masks: TypeAlias = npt.NDArray[np.int32]
"""Which tokens some draws may choose from, `[draws, ceil(vocabulary / 32)]`: token t is bit t % 32,
counted from the lowest, of word t // 32.
"""

NO_MASKS: Masks = np.zeros((0, 0), dtype=np.int32)


class StepMasks(NamedTuple):
    """The masks of a step's draws, and the sequences whose masks are late.

    `sequence_ids[i]` is the sequence that `masks[i]` is for. A verified draft has a mask for each
    of its draws, in order; draws beyond the masks that it has are skipped. A sequence without any
    mask may choose every token, in all of its draws. Of a sequence that is `late` the logits after
    its last own token are saved, and nothing is drawn.
    """

    sequence_ids: Sequence[SequenceId] = ()
    masks: Masks = NO_MASKS
    late: Sequence[SequenceId] = ()


class SampledToken(NamedTuple):
    """A token that was drawn, with its log-probability where the request wants any."""

    token_id: int
    logprob: TokenLogprob | None = None


Vector: TypeAlias = npt.NDArray[np.float32]
"""`[dimensions]` of a hidden state, or `[labels]` of a classifier's scores."""


class Prefilled(NamedTuple):
    """A prefill row was computed that samples nothing."""

    scores: tuple[TokenLogprob, ...] = ()
    vector: Vector | None = None  # the sum of the hidden states that the row pools


class Sampled(NamedTuple):
    """A row was computed and its next token drawn."""

    token: SampledToken
    scores: tuple[TokenLogprob, ...] = ()


class Verified(NamedTuple):
    """A draft was verified: its accepted tokens, and after them the token that was drawn instead of
    the first rejected one, or after the whole draft. At least one token.
    """

    tokens: tuple[SampledToken, ...]


class Late(NamedTuple):
    """A row was computed and its logits saved: its mask was late. A `Resample` row draws from them.

    Of a verified draft only the row's own token counts.
    """

    scores: tuple[TokenLogprob, ...] = ()


class Failed(NamedTuple):
    """A row could not be computed, or no token could be drawn. Other rows are not affected."""

    message: str


RowResult: TypeAlias = Prefilled | Sampled | Verified | Late | Failed


class StepResult(NamedTuple):
    """The result of each row, in order, and what each `ReadBlock` op of the plan has read."""

    rows: Sequence[RowResult]
    read: Sequence[Parts] = ()


class RunnerLost(Exception):
    """The device's memory is in an unknown state: nothing can be computed any more."""


class ModelRunner(Protocol):
    """Computes steps, one while the next is planned. Lives on the engine thread, where it was made.

        submit(1) sample(1) submit(2) collect(1) sample(2) submit(3) collect(2) ...

    A step with `Verify` rows is collected before the next one is submitted.

    Each method may raise whatever the device raises. A step for which `submit` or `sample` has
    raised is forgotten, and all steps are when `collect` has; the blocks of their rows are then
    undefined, all others untouched. Raises RunnerLost when that cannot be said.
    """

    def submit(self, plan: StepPlan) -> None:
        """Change the batch and begin the forwards. Returns while they run, or wait.

        The token of a `Decode` row may still be on its way: the device has it before the host does.
        What the plan fills in and reads may have to wait for the step in flight.
        """
        ...

    def sample(self, masks: Callable[[], StepMasks] | None) -> None:
        """Compute the rest of the step that was submitted last and draw its tokens, now that the
        step before it is collected. Returns while the device computes. `masks` is called once the
        forwards are launched; None: no row has a mask. What it raises is raised.
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
    kv_format: str  # the layout of the bytes that a step reads, of each part `part_bytes`
    software: str  # the versions of the software that computes these numbers
    part_bytes: tuple[int, ...]  # of a block, of each window's block, of a state
    memory: Callable[[], MemoryStats]  # on any thread
    decode: Callable[[], DecodeStats]  # on any thread
    rest: Callable[[], None]  # what is left for when nothing is to be computed
    release_thread: Callable[[], None]  # gives back what MLX keeps for the thread; its last act
