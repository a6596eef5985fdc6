"""What drafts add to the bookkeeping of a step: `python -m load_tests.bench.draft_steps`.

No model, no tensors. Sequences generate tokens after prompts of the given length, with drafts and
without: runs that repeat, for which many draft tokens are right, or unrelated tokens, which no
source knows. Plan decides whether to wait for drafts, makes them and plans the step, in
microseconds a row. Commit learns from the step's time and appends its tokens, in microseconds a
token. Results and the seconds of steps are invented. Times are the thread's own, medians over
steps.
"""

import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Annotated

import typer

from engine.core.metrics import Metrics
from engine.core.request import Limits, prepare
from engine.core.scheduler import Scheduler, Step
from engine.core.sequence import LiveSequence
from engine.core.step import (
    Prefill,
    Prefilled,
    Row,
    RowResult,
    Sampled,
    SampledToken,
    StepResult,
    Verified,
    Verify,
)
from engine.drafts.policy import DraftPolicy
from engine.output.text import output_factory
from engine.values.request import Request
from kvstore.pool import BlockPool, blocks_for
from kvstore.store import KVStore
from kvstore.tree import RadixTree
from load_tests.bench.drafting import TEXTS, Text
from load_tests.bench.steps import silent
from load_tests.report import Table
from load_tests.terminal import show_figures

BLOCK_SIZE_TOKENS = 32
STEP_TOKENS = 2048
VOCABULARY = 150_000
CASES = ((1, 1_000), (1, 32_000), (8, 8_000), (32, 1_000), (32, 8_000))
"""Sequences, tokens of prompt."""

_STEP_SECONDS, _ROW_SECONDS, _DRAFT_SECONDS = 20e-3, 1e-3, 0.5e-3
"""The invented seconds of a step, and of each of its rows and draft tokens."""


@dataclass(frozen=True, slots=True)
class Figures:
    text: str
    sequences: int
    prompt_tokens: int
    plan_off: float
    plan_on: float
    commit_off: float
    commit_on: float
    accepted_percent: float
    """Of the tokens generated, those that drafts had right."""


@dataclass(frozen=True, slots=True)
class Times:
    """Of one step, in seconds: of its rows and of its tokens."""

    plan: float
    commit: float


class Workload:
    """Sequences whose answers are known beforehand."""

    def __init__(
        self, text: Text, sequences: int, prompt_tokens: int, answer_tokens: int, drafts: bool
    ) -> None:
        source = random.Random(f"{sequences}/{prompt_tokens}")
        n_tokens = prompt_tokens + answer_tokens
        pool = BlockPool(sequences * (blocks_for(n_tokens, BLOCK_SIZE_TOKENS) + 2))
        store = KVStore(pool, RadixTree(pool, BLOCK_SIZE_TOKENS), BLOCK_SIZE_TOKENS)
        limits = Limits(
            vocab_size=VOCABULARY,
            max_context_tokens=n_tokens,
            arena_tokens=pool.n_blocks * BLOCK_SIZE_TOKENS,
            max_running=sequences,
            max_waiting=2 * sequences,  # a client may take half
            step_tokens=STEP_TOKENS,
        )
        self.scheduler = Scheduler(
            store,
            output_factory(frozenset(), silent),
            limits,
            lambda: 7,
            Metrics(),
            drafts=DraftPolicy(store) if drafts else None,
        )
        self._answers = dict[str, list[int]]()
        self._in_flight: Step | None = None
        self._committing = 0.0  # seconds
        for index in range(sequences):
            prompt = [index, *text(source, prompt_tokens - 1)]
            request = Request(f"{index}", tuple(prompt), answer_tokens)
            self._answers[request.id] = text(source, answer_tokens)
            self.scheduler.add(prepare(request, limits))
        while self.scheduler.waiting or self.scheduler.sequences.prefilling:
            self.step()

    def steps(self) -> Iterator[Times]:
        """Each step in which all sequences decode: seconds a row, and seconds a token."""
        n_rows = len(self.scheduler.running)
        while len(self.scheduler.running) == n_rows:
            self._committing, before = 0.0, self.scheduler.metrics.generated_tokens
            planning = self.step()
            if n_tokens := self.scheduler.metrics.generated_tokens - before:
                yield Times(planning / n_rows, self._committing / n_tokens)

    def step(self) -> float:
        """Seconds that planning a step takes, in the order of the engine's loop."""
        before, self._in_flight = self._in_flight, None
        start = time.thread_time()
        is_early = before is not None and (before.n_drafts > 0 or self.scheduler.prefers_sync)
        planning = time.thread_time() - start
        if is_early and before is not None:
            self._commit(before)
            before = None
        start = time.thread_time()
        self._in_flight = self.scheduler.plan()
        planning += time.thread_time() - start
        self.scheduler.take_events()
        if before is not None:
            self._commit(before)
        return planning

    def _commit(self, step: Step) -> None:
        pairs = zip(step.sequences, step.plan.rows, strict=True)
        result = StepResult([self._result(sequence, row) for sequence, row in pairs])
        shape = step.budget.shape
        rows = shape.decode_rows + len(shape.chunks)
        n_drafts = sum(n_tokens for _, n_tokens in shape.drafts)
        seconds = _STEP_SECONDS + rows * _ROW_SECONDS + n_drafts * _DRAFT_SECONDS
        start = time.thread_time()
        self.scheduler.observe(step, (), seconds)
        self.scheduler.commit(step, result)
        self._committing = time.thread_time() - start

    def _sequences(self) -> Iterator[LiveSequence]:
        yield from self.scheduler.waiting
        yield from self.scheduler.running

    def _result(self, sequence: LiveSequence, row: Row) -> RowResult:
        """As much of the sequence's answer as the step has computed."""
        answer = self._answers[sequence.request.id][sequence.output_tokens :]
        match row:
            case Prefill(samples=False):
                return Prefilled()
            case Verify(draft=draft):
                n_tokens = _n_right(draft, answer) + 1
                return Verified(tuple(map(SampledToken, answer[:n_tokens])))
            case _:  # a sequence that has ended meanwhile has no more of an answer
                return Sampled(SampledToken(next(iter(answer), 0)))


def _n_right(draft: tuple[int, ...], answer: list[int]) -> int:
    """How many of the draft's tokens are the next of the answer."""
    pairs = zip(draft, answer, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def measure(text: Text, sequences: int, prompt_tokens: int, answer_tokens: int) -> Figures:
    on, off = (
        Workload(text, sequences, prompt_tokens, answer_tokens, drafts) for drafts in (True, False)
    )
    on_times, off_times = list(on.steps()), list(off.steps())
    metrics = on.scheduler.metrics
    accepted = sum(each.accepted_tokens for each in metrics.drafts.values())
    return Figures(
        text=text.__name__,
        sequences=sequences,
        prompt_tokens=prompt_tokens,
        plan_off=1e6 * statistics.median(each.plan for each in off_times),
        plan_on=1e6 * statistics.median(each.plan for each in on_times),
        commit_off=1e6 * statistics.median(each.commit for each in off_times),
        commit_on=1e6 * statistics.median(each.commit for each in on_times),
        accepted_percent=100 * accepted / metrics.generated_tokens,
    )


def table(all_figures: list[Figures]) -> Table:
    columns = ("text", "sequences", "prompt", "plan off", "on", "commit off", "on", "accepted")
    rows = (
        (
            figures.text,
            str(figures.sequences),
            f"{figures.prompt_tokens:,}",
            f"{figures.plan_off:.1f}",
            f"{figures.plan_on:.1f}",
            f"{figures.commit_off:.1f}",
            f"{figures.commit_on:.1f}",
            f"{figures.accepted_percent:.0f}%",
        )
        for figures in all_figures
    )
    return Table(columns, tuple(rows))


def main(
    answer_tokens: int = 512, json_path: Annotated[Path | None, typer.Option("--json")] = None
) -> None:
    """Measure steps of several numbers of sequences, with drafts and without."""
    figures = [measure(text, *case, answer_tokens) for text in TEXTS for case in CASES]
    show_figures(table(figures), figures, json_path)


if __name__ == "__main__":
    typer.run(main)
