"""What goes down to the runner and what comes back: closed values, to be pickled or replayed.

The runner keeps the batch: each row's tables, its position, how it is sampled and the token that it
sampled last. A plan says what changes in the batch, and what of it is computed. Plans are submitted
in order, each made before the step of the one before it has been collected.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NewType, TypeAlias

import numpy as np
import numpy.typing as npt

from engine.step.work import StepWork
from engine.types.output import TokenLogprob
from engine.types.request import SamplingParams
from kvstore.actions import (
    FillBlock,
    FillState,
    FillWindow,
    Parts,
    ReadBlock,
    StorageOp,
    TablePatch,
)

NO_WORK = StepWork()

SequenceId = NewType("SequenceId", int)
"""Names a sequence for as long as the engine runs; never used twice, later ones are higher."""


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
class Entry:
    """A sequence enters the batch. Its tables come as patches, its first tokens in chunks."""

    sequence_id: SequenceId
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one sequence to compute: positions [start, start + len(tokens))."""

    sequence_id: SequenceId
    start: int
    tokens: tuple[int, ...]  # at least one
    samples: bool  # a token is sampled after the last one
    prompt_logprobs: int | None = None  # score each token after `tokens[i]` (see `next_tokens`)
    next_tokens: tuple[int, ...] = ()  # with prompt_logprobs: the token that follows tokens[i]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step, in the order in which it is carried out.

    `decodes` are sequences that compute the token which they sampled last, and sample the next.
    `kept` compute nothing: they sample from the logits of an earlier step that they sat out.
    """

    leave: tuple[SequenceId, ...] = ()  # out of the batch, before anybody enters
    enter: tuple[Entry, ...] = ()
    patches: tuple[tuple[SequenceId, TablePatch], ...] = ()
    before: tuple[StorageOp, ...] = ()  # carried out before anything is written
    chunks: tuple[Chunk, ...] = ()
    after_chunks: tuple[StorageOp, ...] = ()  # carried out behind the chunks
    decodes: tuple[SequenceId, ...] = ()
    after: tuple[StorageOp, ...] = ()  # carried out behind all that is written
    work: StepWork = NO_WORK  # by which its time was predicted
    reads: tuple[ReadBlock, ...] = ()  # carried out last
    number: int = 0  # by which the planner knows it again
    kept: tuple[SequenceId, ...] = ()

    @property
    def is_due(self) -> bool:
        """Whether there is anything to do with it; what changes in the batch alone can wait."""
        ops = self.before or self.after_chunks or self.after
        return bool(self.chunks or self.decodes or self.kept or ops or self.reads)

    @property
    def is_scoring(self) -> bool:
        """Whether tokens of prompts are scored."""
        return any(chunk.prompt_logprobs is not None for chunk in self.chunks)

    @property
    def is_filling(self) -> bool:
        """Whether it fills in what was on disk."""
        fills = FillBlock | FillWindow | FillState
        return any(isinstance(op, fills) for op in self.before)

    def rows(self) -> Iterator[tuple[SequenceId, int]]:
        """Who computes, and how many tokens."""
        for chunk in self.chunks:
            yield chunk.sequence_id, len(chunk.tokens)
        for sequence_id in self.decodes:
            yield sequence_id, 1
        for sequence_id in self.kept:
            yield sequence_id, 0

    def sampling(self) -> Iterator[SequenceId]:
        """Who samples a token."""
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

    Those that are `late` have none yet: they sit the step out, and their logits are kept.
    """

    sequence_ids: Sequence[SequenceId] = ()
    masks: Masks = field(default_factory=lambda: NO_MASKS)
    late: Sequence[SequenceId] = ()


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token that was chosen, with its log-probability where the request asks for any."""

    token_id: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the runner computed, by sequence, and what it was to read."""

    sampled: Mapping[SequenceId, SampledToken]  # for each row that samples and is not late
    scored: Mapping[SequenceId, tuple[TokenLogprob, ...]]  # for rows with prompt_logprobs
    failed: Mapping[SequenceId, str] = field(default_factory=dict)  # rows that failed alone
    read: tuple[Parts, ...] = ()  # one for each of the plan's reads
