"""What goes down to the runner and what comes back. Rows view live leases until commit."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NewType, TypeAlias

import numpy as np
import numpy.typing as npt

from engine.types import SamplingParams, TokenLogprob
from kvstore.actions import Order
from kvstore.groups.group import Hold
from kvstore.types import BlockId

SequenceId = NewType("SequenceId", int)
"""Names a sequence for as long as the engine runs; never used twice, later ones are higher."""


Masks: TypeAlias = npt.NDArray[np.int32]
"""Which tokens some rows may choose from, `[rows, ceil(vocabulary / 32)]`: token t of a row is bit
t % 32, from the lowest, of word t // 32.
"""

NO_MASKS: Masks = np.zeros((0, 0), dtype=np.int32)

AskMasks: TypeAlias = Callable[[Sequence[SequenceId]], Masks]
"""Gives the masks of some sequences, in their order."""


def no_masks(sequence_ids: Sequence[SequenceId]) -> Masks:
    """The AskMasks of steps in which no row is masked."""
    return NO_MASKS


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """Sample one token after the row's last token.

    The draw depends on (seed, output_index) and on the row's own logits alone, so a preempted
    sequence that comes back draws what it would have drawn.
    """

    params: SamplingParams
    seed: int
    output_index: int  # how many tokens the sequence has generated before this one
    prompt_tokens: Sequence[int] = ()  # for repetition_penalty; empty when it is off
    output_tokens: Sequence[int] = ()  # for penalties; empty when all are off
    banned_tokens: Sequence[int] = ()  # must not be sampled (stop tokens before min_tokens)
    masked: bool = False  # the tokens to choose from are in a mask, asked for when it is needed


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens of one sequence to compute in this step: positions [start, start + len(tokens))."""

    sequence_id: SequenceId
    start: int
    tokens: Sequence[int]  # at least one
    blocks: Sequence[BlockId]  # table; covers all positions up to start + len(tokens)
    sample: SampleOrder | None = None  # None: more of the prompt is still to come
    prompt_logprobs: int | None = None  # score each token after `tokens[i]` (see `next_tokens`)
    next_tokens: Sequence[int] = ()  # with prompt_logprobs: the token that follows tokens[i]
    holds: Sequence[Hold] = ()  # the lease's shares of the store's groups, in their order


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. `orders` are carried out in order, before anything is written."""

    orders: tuple[Order, ...] = ()
    rows: tuple[Row, ...] = ()


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token that was chosen, with its log-probability where the request asks for any."""

    token_id: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the runner computed, by sequence."""

    sampled: Mapping[SequenceId, SampledToken]  # for each row with a SampleOrder
    scored: Mapping[SequenceId, tuple[TokenLogprob, ...]]  # for rows with prompt_logprobs
    failed: Mapping[SequenceId, str] = field(default_factory=dict)  # rows that failed alone
