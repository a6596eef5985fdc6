"""A ModelRunner without a model: carries out plans on a dictionary of slots."""

from collections import Counter
from collections.abc import Callable

import numpy as np

from engine.step import (
    AskMasks,
    Row,
    SampledToken,
    SampleOrder,
    SequenceId,
    StepPlan,
    StepResult,
)
from engine.types import TokenLogprob
from kvstore.actions import CopyBlock, CopyState, CopyWindowBlock, Order, ResetState
from kvstore.block_pool import BlockPool
from kvstore.groups.recurrent import StateHold
from kvstore.groups.window import WindowHold
from kvstore.types import SlotId
from tests.simulation.model import ROOT, chain, sample


def _sampled(token_id: int, order: SampleOrder) -> SampledToken:
    is_asked = order.params.top_logprobs is not None
    return SampledToken(token_id, TokenLogprob(token_id, -1.0) if is_asked else None)


class InjectedError(RuntimeError):
    """What the device might raise."""


class FakeRunner:
    """Computes the hash model of `tests.simulation.model`, reading and writing slots by block.

    Asserts what a real device could not notice: that no block is written which has another holder.
    `fault` is asked before each step and may raise; `row_fault` names rows that fail alone.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        vocab_size: int,
        fault: Callable[[], None],
        row_fault: Callable[[Row], bool],
    ) -> None:
        self._pool = pool
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._fault = fault
        self._row_fault = row_fault
        self._slots: dict[tuple[int, int], tuple[int, int]] = {}  # KV before, and own
        self._windows: dict[tuple[int, SlotId, int], int] = {}  # by group: the slot's own KV
        self._states: dict[SlotId, int] = {}  # the last token's KV
        self.computed_tokens: Counter[SequenceId] = Counter()

    def run(self, plan: StepPlan, masks: AskMasks) -> StepResult:
        assert plan.rows, "a step that computes nothing"
        self._fault()
        for order in plan.orders:
            self._carry_out(order)
        sampled, scored, failed = {}, {}, {}
        for row in plan.rows:
            values = self._forward(row)
            self.computed_tokens[row.sequence_id] += len(row.tokens)
            if self._row_fault(row):
                failed[row.sequence_id] = "injected"
                continue
            if row.sample is not None:
                token_id = sample(
                    values[-1],
                    row.sample.seed,
                    row.sample.output_index,
                    self._vocab_size,
                    self._ruled_out(row, masks),
                )
                sampled[row.sequence_id] = _sampled(token_id, row.sample)
            if row.prompt_logprobs is not None:
                scored[row.sequence_id] = tuple(
                    TokenLogprob(token_id, -float(values[i] % 97))
                    for i, token_id in enumerate(row.next_tokens)
                )
        return StepResult(sampled, scored, failed)

    def _ruled_out(self, row: Row, masks: AskMasks) -> frozenset[int]:
        assert row.sample is not None
        if not row.sample.masked:
            return frozenset(row.sample.banned_tokens)
        (words,) = masks([row.sequence_id])
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")[: self._vocab_size]
        assert bits.any(), "a mask that leaves nothing"
        return frozenset(np.flatnonzero(bits == 0).tolist())

    def _carry_out(self, order: Order) -> None:
        match order:
            case CopyBlock(source, target, n_tokens):
                for slot in range(n_tokens):
                    self._slots[target, slot] = self._slots.get((source, slot), (-1, -1))
            case CopyWindowBlock(group, copied, copy, n_tokens):
                for slot in range(n_tokens):
                    value = self._windows.get((group, copied, slot), -1)
                    self._windows[group, copy, slot] = value
            case ResetState(state):
                self._states[state] = ROOT
            case CopyState(saved, restored):
                self._states[restored] = self._states[saved]

    def _forward(self, row: Row) -> list[int]:
        """KV of the row's tokens, each from the one before as the blocks have it."""
        past = self._attend(row)
        kv, values = past[-1], list[int]()
        self._check_holds(row, past)
        for position, token_id in enumerate(row.tokens, start=row.start):
            block = row.blocks[position // self._block_size]
            assert self._pool.count(block) == 1, f"block {block} is written and shared"
            self._slots[block, position % self._block_size] = kv, chain(kv, token_id)
            kv = chain(kv, token_id)
            values.append(kv)
        self._write_holds(row, values)
        return values

    def _check_holds(self, row: Row, past: list[int]) -> None:
        """The windows hold what the row's tokens will see of them, and the state is its own."""
        for hold in row.holds:
            if isinstance(hold, StateHold):
                assert self._states[hold.slot] == past[-1], "the state of another prefix"
            if isinstance(hold, WindowHold):
                for position in range(max(row.start - hold.group.window + 1, 0), row.start):
                    entry, slot = divmod(position, self._block_size)
                    place = hold.group.index, hold.slots[entry - hold.first], slot
                    assert self._windows[place] == past[position + 1], (
                        f"position {position} of a window holds KV of another prefix"
                    )

    def _write_holds(self, row: Row, values: list[int]) -> None:
        for hold in row.holds:
            if isinstance(hold, StateHold):
                self._states[hold.slot] = values[-1]
            if isinstance(hold, WindowHold):
                for position, value in enumerate(values, start=row.start):
                    entry, slot = divmod(position, self._block_size)
                    own = hold.slots[entry - hold.first]
                    assert hold.group.slots.holders(own) == 1, "a window's block is shared"
                    self._windows[hold.group.index, own, slot] = value

    def _attend(self, row: Row) -> list[int]:
        """Read every position before the row's first, as attention does: ROOT and their KV."""
        kv = ROOT
        past = [kv]
        for position in range(row.start):
            block = row.blocks[position // self._block_size]
            previous, own = self._slots[block, position % self._block_size]
            assert previous == kv, f"position {position} holds KV of another prefix"
            kv = own
            past.append(kv)
        return past
