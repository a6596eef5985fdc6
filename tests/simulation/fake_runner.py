"""A ModelRunner without a model: carries out plans on a dictionary of slots."""

from collections import Counter
from collections.abc import Callable

from engine.step import Row, SequenceId, StepPlan, StepResult
from engine.types import TokenLogprob
from kvstore.block_pool import BlockPool
from tests.simulation.model import ROOT, chain, sample


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
        self.computed_tokens: Counter[SequenceId] = Counter()

    def run(self, plan: StepPlan) -> StepResult:
        assert plan.rows, "a step that computes nothing"
        self._fault()
        for copy in plan.copies:
            for slot in range(copy.n_tokens):
                self._slots[copy.target, slot] = self._slots.get((copy.source, slot), (-1, -1))
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
                    frozenset(row.sample.banned_tokens),
                )
                sampled[row.sequence_id] = TokenLogprob(token_id, -1.0)
            if row.prompt_logprobs is not None:
                scored[row.sequence_id] = tuple(
                    TokenLogprob(token_id, -float(values[i] % 97))
                    for i, token_id in enumerate(row.next_tokens)
                )
        return StepResult(sampled, scored, failed)

    def _forward(self, row: Row) -> list[int]:
        """KV of the row's tokens, each from the one before as the blocks have it."""
        kv, values = self._attend(row), list[int]()
        for position, token_id in enumerate(row.tokens, start=row.start):
            block = row.blocks[position // self._block_size]
            assert self._pool.count(block) == 1, f"block {block} is written and shared"
            self._slots[block, position % self._block_size] = kv, chain(kv, token_id)
            kv = chain(kv, token_id)
            values.append(kv)
        return values

    def _attend(self, row: Row) -> int:
        """Read every position before the row's first, as attention does; the last one's KV."""
        kv = ROOT
        for position in range(row.start):
            block = row.blocks[position // self._block_size]
            previous, own = self._slots[block, position % self._block_size]
            assert previous == kv, f"position {position} holds KV of another prefix"
            kv = own
        return kv
