"""The interface of scheduler and runner: plans of steps, their results, and the runner.

A step plan is a list of rows and one ordered list of storage ops. The runner answers each row with
one result, in the order of the rows. All of these are plain values that can be pickled and
replayed.

The runner keeps the batch between steps: the tables, position, sampling parameters and last sampled
token of each sequence. A plan has the changes of the batch and the rows to compute. A step is
planned while the previous one is computed, except after a step with drafts, or if drafts of the
next step would gain more than the overlap.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from types import MappingProxyType
from typing import Any, NamedTuple, NewType, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from engine.values.images import Image, ImageInput
from engine.values.model import ModelCard, Tokenizer
from engine.values.output import TokenLogprob
from engine.values.request import Pooling, SamplingParams
from engine.values.stats import DecodeStats, MemoryStats
from engine.values.tokens import NO_TOKENS, PackedTokens
from kvstore.ops import Parts, ReadBlock, StepOp, StorageOp, TablePatch, When
from kvstore.sizes import StorageBytes, StorageSizes
from kvstore.types import BlockId, SlotId

SequenceId = NewType("SequenceId", int)
"""Identifies a sequence. Never used twice while the engine runs; later ids are higher."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one engine. `arena_tokens` is how many tokens one sequence may have KV for."""

    vocab_size: int
    max_context_tokens: int
    arena_tokens: int
    max_running: int
    max_waiting: int
    step_tokens: int
    step_stretch: float = math.inf  # longest step with prompts over one of decodes alone
    adapters: frozenset[str] = frozenset()
    pools: bool = False  # whether the model's hidden states can be pooled
    images: ImageInput | None = None  # None: the model takes none

    def __post_init__(self) -> None:
        if self.step_tokens < self.max_running:
            raise ValueError(
                f"step_tokens ({self.step_tokens}) must be at least max_running "
                f"({self.max_running}): every running sequence computes a token in a step"
            )


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling state of a sequence when it enters the batch.

    A draw depends only on the seed, on the token's index in the output and on the row's logits, so
    a sequence that was preempted draws the same tokens again.
    """

    params: SamplingParams
    seed: int
    output_index: int = 0  # number of tokens generated before it enters
    prompt_tokens: PackedTokens = NO_TOKENS  # for repetition_penalty and DRY; empty without
    output_tokens: tuple[int, ...] = ()  # for penalties, DRY and bad words; empty without
    banned_tokens: tuple[int, ...] = ()  # banned before `min_tokens`, in rows without a mask


@dataclass(frozen=True, slots=True)
class BatchEntry:
    """A sequence that enters the batch. Its tables follow as patches, its tokens as rows."""

    sequence_id: SequenceId
    sampling: Sampling
    adapter: str = ""  # the LoRA adapter that computes its tokens; "" for none
    images: tuple[Image, ...] = ()  # of its prompt


class Encode(NamedTuple):
    """Compute `n_stages` stages of an image's vision tower, from `first_stage` on, before the
    forwards of the step. After the last stage its features are kept until they are forgotten. The
    stages of one image come in order, each once, unless it is forgotten between them.
    """

    image: Image
    first_stage: int
    n_stages: int


class Score(NamedTuple):
    """A request for the log-probability of the token after each token of a prefill row."""

    next_tokens: tuple[int, ...]  # one after each token of the row, but none after the prompt
    n_top: int  # alternatives to report for each


class Prefill(NamedTuple):
    """Compute known tokens of a sequence: positions [start, start + len(tokens)).

    These are tokens of its prompt, or tokens that are computed again after a preemption or after a
    draft was rejected.
    """

    sequence_id: SequenceId
    start: int
    tokens: tuple[int, ...]
    samples: bool = False  # whether a token is sampled after the last one
    score: Score | None = None
    pooling: Pooling | None = None  # which of these tokens' hidden states are pooled


class Decode(NamedTuple):
    """Compute the last sampled token, which the device has, and sample the next."""

    sequence_id: SequenceId


class Verify(NamedTuple):
    """Compute the last sampled token `token` at position `start` and a draft after it.

    A token is sampled after `token` and after each token of the draft. Sampled tokens that equal
    the draft are accepted. The first that differs, or the one after the whole draft, is kept as the
    last.
    """

    sequence_id: SequenceId
    start: int
    token: int
    draft: tuple[int, ...]


class Resample(NamedTuple):
    """Sample from the logits that an earlier step saved because the row's mask was late."""

    sequence_id: SequenceId


Row: TypeAlias = Prefill | Decode | Verify | Resample


class DraftNext(NamedTuple):
    """Have the draft model continue a sequence by `n_draft` tokens, after the tokens that its row
    samples in this step.

    The draft model's own KV lacks the known `tokens`, which begin at position `start`. It has KV of
    the tokens `ahead` after them, which it has drafted: those that are sampled now are not computed
    again. With `n_draft` 0 the `tokens` are computed and nothing is drafted.
    """

    sequence_id: SequenceId
    start: int
    tokens: tuple[int, ...]
    ahead: tuple[int, ...] = ()
    n_draft: int = 0


@dataclass(slots=True)
class DraftPlan:
    """The draft model's part of a step, over blocks of its own: they are none of the plan's."""

    rows: list[DraftNext] = field(default_factory=list)
    leave: Sequence[SequenceId] = ()  # their tables are dropped, before any is patched
    patches: list[tuple[SequenceId, TablePatch]] = field(default_factory=list)
    ops: Sequence[StepOp] = ()  # before its forwards


@dataclass(slots=True)
class StepPlan:
    """A step for the runner. The scheduler fills it, and does not change it after submission."""

    number: int = 0  # identifies the step for its planner
    leave: Sequence[SequenceId] = ()  # they leave the batch before any sequence enters
    enter: list[BatchEntry] = field(default_factory=list)
    patches: list[tuple[SequenceId, TablePatch]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)  # at most one of each sequence
    ops: Sequence[StepOp] = ()  # in the order in which the store queued them
    # Digests of images of which nothing is kept, finished or not, before any is encoded. Digests
    # that are not known are ignored.
    forget: Sequence[bytes] = ()
    encode: list[Encode] = field(default_factory=list)  # a step may have no rows, and these alone
    draft: DraftPlan | None = None  # None: the draft model computes nothing, or there is none

    def ops_at(self, when: When) -> list[StorageOp]:
        """The ops of one phase of the step, without reads."""
        return [op for at, op in self.ops if at is when and not isinstance(op, ReadBlock)]

    @property
    def reads(self) -> list[ReadBlock]:
        """The blocks that the step reads, after everything else."""
        return [op for _, op in self.ops if isinstance(op, ReadBlock)]


Masks: TypeAlias = npt.NDArray[np.int32]
"""The tokens that each draw may choose, `[draws, ceil(vocabulary / 32)]`: token t is bit t % 32 of
word t // 32, counted from the lowest bit.
"""

NO_MASKS: Masks = np.zeros((0, 0), dtype=np.int32)


class StepMasks(NamedTuple):
    """The masks of a step's draws, and the sequences whose masks are late.

    `sequence_ids[i]` is the sequence of `masks[i]`. A verified draft has a mask for each of its
    draws, in order; draws without a mask are skipped. A sequence without any mask may choose every
    token in all of its draws. Nothing is drawn for a `late` sequence: the logits after its own last
    token are saved.
    """

    sequence_ids: Sequence[SequenceId] = ()
    masks: Masks = NO_MASKS
    late: Sequence[SequenceId] = ()


NO_STEP_MASKS = StepMasks()
"""Each row may choose every token."""


class SampledToken(NamedTuple):
    """A token that was drawn, and its log-probability if the request wants it."""

    token_id: int
    logprob: TokenLogprob | None = None


Vector: TypeAlias = npt.NDArray[np.float32]
"""`[dimensions]` of a hidden state, or `[labels]` of a classifier's scores."""


class Prefilled(NamedTuple):
    """The result of a prefill row that samples nothing."""

    scores: tuple[TokenLogprob, ...] = ()
    vector: Vector | None = None  # the sum of the hidden states that the row pools


class Sampled(NamedTuple):
    """The result of a row whose next token was drawn."""

    token: SampledToken
    scores: tuple[TokenLogprob, ...] = ()


class Verified(NamedTuple):
    """The result of a verified draft: its accepted tokens, and then the token that was drawn in
    place of the first rejected one, or after the whole draft. At least one token.
    """

    tokens: tuple[SampledToken, ...]


class Late(NamedTuple):
    """The result of a row whose mask was late: its logits are saved, and a `Resample` row draws
    from them. If the row verified a draft, only the row's own token counts.
    """

    scores: tuple[TokenLogprob, ...] = ()


class Failed(NamedTuple):
    """The result of a row that could not be computed or sampled. Other rows are not affected."""

    message: str


RowResult: TypeAlias = Prefilled | Sampled | Verified | Late | Failed


class NotDrafted(Enum):
    """Why a draft model has computed nothing in a step. Its storage holds nothing any more."""

    NO_MEMORY = auto()  # it may compute again
    FAILED = auto()  # it does not


NOTHING_DRAFTED: Mapping[SequenceId, tuple[int, ...]] = MappingProxyType({})


class StepResult(NamedTuple):
    """The result of each row, in order, and the data of each `ReadBlock` op of the plan.

    `drafted` has the draft model's tokens for each sequence that it has computed, none for a row
    without a draft. A sequence whose row has sampled nothing is missing.

    `not_encoded` has the images of the plan that could not be encoded, by digest, each with the
    reason in words for clients. Nothing is kept of them, and the results of rows that need them,
    in this step or a later one that was submitted before this was collected, mean nothing.
    """

    rows: Sequence[RowResult]
    read: Sequence[Parts] = ()
    drafted: Mapping[SequenceId, tuple[int, ...]] | NotDrafted = NOTHING_DRAFTED
    not_encoded: Mapping[bytes, str] = MappingProxyType({})


class StepLost(Exception):
    """What a step was computed with has failed, and computes nothing any more. The step may succeed
    if it is computed again, without the images that the device cannot encode.

    `not_encoded` has these images by digest, each with the reason. Nothing is kept of them.
    """

    def __init__(self, message: str, not_encoded: Mapping[bytes, str] = MappingProxyType({})):
        super().__init__(message)
        self.not_encoded = not_encoded


class StorageLost(StepLost):
    """No block and no state holds what it did, for any sequence, and no image's features are kept.
    A step that is in flight is lost as well, which its `collect` says.
    """


class RunnerLost(Exception):
    """The device's memory is in an unknown state: nothing can be computed any more."""


class ModelRunner(Protocol):
    """Computes a step while the next is planned. Used only on the engine thread, which made it.

        submit(1) launch(1) draw(1) submit(2) collect(1) launch(2) draw(2) submit(3) collect(2) ...

    A step with `Verify` rows or a draft plan is collected before the next one is submitted. All
    arguments and results are values, so that a run can be replayed.

    Each method may raise whatever the device raises. If `submit`, `launch` or `draw` raises, that
    step is dropped; if `collect` raises, all steps are. The blocks of their rows are then
    undefined, and all others are unchanged. If the runner cannot guarantee that, it raises
    StorageLost or RunnerLost. StepLost that names no image comes a bounded number of times.
    """

    def submit(self, plan: StepPlan) -> None:
        """Change the batch and launch the forwards. Returns before they are done.

        The token of a `Decode` row may be unknown to the host: the device has it first. Ops that
        fill in and read blocks may have to wait for the step in flight.
        """
        ...

    def launch(self) -> None:
        """Launch the rest of the forwards of the step that was submitted last, after the previous
        step was collected. Returns while the device computes.
        """
        ...

    def draw(self, masks: StepMasks) -> None:
        """Draw the tokens of the step that was launched. Returns while the device computes."""
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest step that was not collected, and for the blocks that it reads."""
        ...


@dataclass(frozen=True, slots=True)
class DraftStorage:
    """The storage of the draft model, the most tokens of a sequence that it can compute, and what a
    forward of it presumably takes of one of the target model.
    """

    sizes: StorageSizes
    context_tokens: int
    cost_share: float


class GiveBack(NamedTuple):
    """Gives memory of the storage back to the system. Used on the engine thread, while no op waits
    to be planned.

    `shrink` gets all free blocks. Where the storage grows with its use, the next step, or the next
    rest, cuts off those after the last block in use, if they are worth the copy of all others.
    `release` gets free blocks, and free slots of each group, and gives their memory back where
    that needs no copy. It waits for the steps in flight.
    """

    shrink: Callable[[Collection[BlockId]], None]
    release: Callable[[Sequence[BlockId], Sequence[Sequence[SlotId]]], None]


@dataclass(frozen=True, slots=True)
class Backend:
    """The parts of a loaded model that the engine needs."""

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
    rest: Callable[[], None]  # work that is left until there is nothing to compute
    give_back: GiveBack
    release_unused: Callable[[], None]  # memory that nothing uses, to the system; on any thread
    release_thread: Callable[[], None]  # frees MLX's memory of the thread; the last call on it
    draft: DraftStorage | None = None  # None: there is no draft model
