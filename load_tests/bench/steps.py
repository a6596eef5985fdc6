"""What the bookkeeping of a step costs beside long contexts. No model, no tensors.

    python -m load_tests.bench.steps [--json PATH]

So many sequences decode at once, each with the given context. They begin with one prompt, off whose
path a short branch leaves at every block, so that the path is as fragmented as it can be. A step is
`plan` and `commit`; the result in between is made up. With groups the store has a sliding window
and recurrent states as well. Times are the thread's own, in milliseconds over the steps, in
which each sequence completes some blocks.
"""

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from engine.core.metrics import Metrics
from engine.core.request import Limits, prepare
from engine.core.scheduler import Scheduler
from engine.core.step import (
    Prefill,
    Prefilled,
    Row,
    RowResult,
    Sampled,
    SampledToken,
    StepPlan,
    StepResult,
)
from engine.output.text import Detokenizer, output_factory
from engine.values.request import Request, SamplingParams
from kvstore.pool import BlockPool
from kvstore.recurrent import RecurrentGroup
from kvstore.slots import Group
from kvstore.store import KVStore
from kvstore.tree import RadixTree
from kvstore.window import WindowGroup, lease_slots
from load_tests.report import Table
from load_tests.terminal import show_figures

BLOCK_SIZE_TOKENS = 32
WINDOW_TOKENS = 1024
STEP_TOKENS = 2048
VOCABULARY = 150_000
CASES = ((1, 32_768), (32, 32_768), (256, 4_096), (256, 32_768))
"""Sequences, tokens of context."""


@dataclass(frozen=True, slots=True)
class Figures:
    sequences: int
    context_tokens: int
    groups: str
    penalties: str
    median_milliseconds: float
    p99_milliseconds: float
    most_milliseconds: float


class Silent:
    """A Detokenizer whose tokens have no text."""

    def add(self, token_id: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


def silent(request: Request) -> Detokenizer:
    return Silent()


class Workload:
    """Sequences that have computed their prompts and decode from now on."""

    def __init__(
        self, sequences: int, context_tokens: int, has_groups: bool, sampling: SamplingParams
    ) -> None:
        self._random = random.Random(sequences * context_tokens)
        self._prompt = self._tokens(context_tokens)
        n_blocks = context_tokens // BLOCK_SIZE_TOKENS
        pool = BlockPool(4 * n_blocks + 64 * sequences)
        self.store = KVStore(
            pool,
            RadixTree(pool, BLOCK_SIZE_TOKENS),
            BLOCK_SIZE_TOKENS,
            self._groups(sequences) if has_groups else (),
        )
        self._limits = Limits(
            vocab_size=VOCABULARY,
            max_context_tokens=2 * context_tokens,
            arena_tokens=pool.n_blocks * BLOCK_SIZE_TOKENS,
            max_running=sequences,
            max_waiting=2 * sequences,  # a client may take half
            step_tokens=max(STEP_TOKENS, sequences),
        )
        self._scheduler = Scheduler(
            self.store,
            output_factory(frozenset(), silent),
            self._limits,
            lambda: 7,
            Metrics(),
        )
        self._fill(context_tokens)
        for index in range(sequences):
            # They differ in length so that some complete a block in every step.
            prompt = [*self._prompt[: context_tokens - index % BLOCK_SIZE_TOKENS], index]
            self._add(f"running-{index}", prompt, context_tokens // 2, sampling)
        while self._scheduler.waiting or self._has_prompts():
            self.step()

    def step(self) -> float:
        """Seconds that planning and committing take."""
        start = time.thread_time()
        step = self._scheduler.plan()
        planned = time.thread_time()
        assert step is not None
        result = self._result(step.plan)
        computed = time.thread_time()
        self._scheduler.take_events()
        self._scheduler.commit(step, result)
        return planned - start + time.thread_time() - computed

    def _groups(self, sequences: int) -> Sequence[Group]:
        n_slots = 2 * sequences * lease_slots(WINDOW_TOKENS, BLOCK_SIZE_TOKENS, STEP_TOKENS)
        return (
            WindowGroup(0, WINDOW_TOKENS, n_slots, BLOCK_SIZE_TOKENS, STEP_TOKENS),
            RecurrentGroup(sequences, sequences, BLOCK_SIZE_TOKENS, 1024),
        )

    def _fill(self, context_tokens: int) -> None:
        for depth in range(0, context_tokens, BLOCK_SIZE_TOKENS):
            branch = self._tokens(BLOCK_SIZE_TOKENS)
            self._add(f"branch-{depth}", self._prompt[:depth] + branch, 1, SamplingParams())
            while self._scheduler.has_work:
                self.step()

    def _add(self, name: str, prompt: list[int], max_tokens: int, sampling: SamplingParams) -> None:
        request = Request(name, tuple(prompt), max_tokens, sampling=sampling)
        self._scheduler.add(prepare(request, self._limits))

    def _has_prompts(self) -> bool:
        return bool(self._scheduler.sequences.prefilling)

    def _tokens(self, n_tokens: int) -> list[int]:
        return self._random.choices(range(VOCABULARY), k=n_tokens)

    def _result(self, plan: StepPlan) -> StepResult:
        return StepResult(tuple(map(self._row_result, plan.rows)))

    def _row_result(self, row: Row) -> RowResult:
        if isinstance(row, Prefill) and not row.samples:
            return Prefilled()
        return Sampled(SampledToken(self._random.randrange(VOCABULARY)))


def measure(
    sequences: int, context_tokens: int, has_groups: bool, sampling: SamplingParams, n_steps: int
) -> Figures:
    workload = Workload(sequences, context_tokens, has_groups, sampling)
    times = sorted(1e3 * workload.step() for _ in range(n_steps))
    return Figures(
        sequences=sequences,
        context_tokens=context_tokens,
        groups="window, states" if has_groups else "none",
        penalties="all" if sampling.repetition_penalty != 1.0 else "none",
        median_milliseconds=statistics.median(times),
        p99_milliseconds=times[len(times) * 99 // 100],
        most_milliseconds=times[-1],
    )


def table(all_figures: Sequence[Figures]) -> Table:
    columns = ("sequences", "context", "groups", "penalties", "median ms", "p99 ms", "most ms")
    rows = (
        (
            str(figures.sequences),
            f"{figures.context_tokens:,}",
            figures.groups,
            figures.penalties,
            f"{figures.median_milliseconds:.2f}",
            f"{figures.p99_milliseconds:.2f}",
            f"{figures.most_milliseconds:.2f}",
        )
        for figures in all_figures
    )
    return Table(columns, tuple(rows))


def main(
    steps: int = 128,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure steps of several numbers of sequences, with and without groups and penalties."""
    plain = SamplingParams()
    penalised = SamplingParams(repetition_penalty=1.1, presence_penalty=0.5)
    all_figures = [measure(*case, False, plain, steps) for case in CASES]
    all_figures.append(measure(*CASES[-1], True, plain, steps))
    all_figures.append(measure(*CASES[-1], True, penalised, steps))
    show_figures(table(all_figures), all_figures, json_path)


if __name__ == "__main__":
    typer.run(main)
