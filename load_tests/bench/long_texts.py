"""How long one request of long texts holds the engine thread, without a model.

    python -m load_tests.bench.long_texts [--tokens 120000] [--n 128] [--runs 7] [--json PATH]

The prompt and the prediction have the given number of tokens, and n outputs are made of them. Each
follows the prediction, leaves it, repeats a part of the prompt and then another part of the
prediction. A stand-in for the runner returns their tokens at once, and the clock of the scheduler
has the time that a model would have taken. Between two calls of the runner the engine thread works.
The figures are its processor time in the turn of the loop where it was longest, by part, and
without the runner's for all of the turn. The first two rows are what the other threads do before.

All runs take the same turns. Of each turn the shortest time of all runs counts: on a virtual
machine the processor time of a single run has pauses of 10 ms, in which other machines had the
processor. Garbage collections move between turns, so theirs is the longest of the run where that
was shortest.

The same request with short texts has the cost of n outputs as such.
"""

import gc
import random
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from engine.core.drafting import DraftPolicy
from engine.core.inbox import Inbox
from engine.core.loop import EngineLoop
from engine.core.metrics import Metrics
from engine.core.scheduler import Scheduler
from engine.core.step import (
    Decode,
    Limits,
    Prefill,
    Prefilled,
    RowResult,
    Sampled,
    SampledToken,
    SequenceId,
    StepMasks,
    StepPlan,
    StepResult,
    Verified,
    Verify,
)
from engine.output.text import output_factory
from engine.remote.calls import CALLS
from engine.remote.wire import events_frames
from engine.values.output import OutputEvent
from engine.values.request import Request
from engine.values.tokens import pack
from kvstore.pool import BlockPool
from kvstore.sizes import StorageBytes
from kvstore.store import KVStore
from kvstore.tree import RadixTree
from load_tests.report import Table
from load_tests.terminal import show_figures

VOCABULARY = 150_000
BLOCK_SIZE = 32
OUTPUT_TOKENS = 200
SHORT_TOKENS = 1_000
STEP_SECONDS, ROW_SECONDS = 0.01, 0.001
TURN = "a whole turn"


@dataclass(frozen=True, slots=True)
class Figures:
    """Milliseconds of the processor in the longest turn, by part of a turn."""

    tokens: int
    n: int
    turns: int
    longest_milliseconds: dict[str, float]


class Letters:
    """Decodes each token as a letter."""

    def add(self, token_id: int) -> str:
        return "x"

    def finish(self) -> str:
        return ""


class Script:
    """The outputs: what the model of the runner would generate."""

    def __init__(self, n_tokens: int, seed: int) -> None:
        draw = random.Random(seed)
        self.prompt = draw.choices(range(VOCABULARY), k=n_tokens)
        self.prediction = draw.choices(range(VOCABULARY), k=n_tokens)

    def token(self, sequence_id: SequenceId, index: int) -> int:
        if index < 8:
            return self.prediction[index]
        if index < 24:
            return (sequence_id * 7919 + index * 104_729) % VOCABULARY
        if index < 60:
            return self.prompt[len(self.prompt) // 2 + index]
        return self.prediction[len(self.prediction) // 2 + index]


class ScriptedRunner:
    """Returns the script's tokens at once. Its clock advances by what a model would take."""

    def __init__(self, script: Script) -> None:
        self.seconds = 0.0
        self._script = script
        self._plans = deque[StepPlan]()
        self._n_tokens: dict[SequenceId, int] = {}

    def submit(self, plan: StepPlan) -> None:
        for entry in plan.enter:
            self._n_tokens[entry.sequence_id] = entry.sampling.output_index
        self._plans.append(plan)

    def launch(self) -> None:
        """Nothing is to be computed."""

    def draw(self, masks: StepMasks) -> None:
        """The tokens are those of the script."""

    def collect(self) -> StepResult:
        rows = self._plans.popleft().rows
        self.seconds += STEP_SECONDS + ROW_SECONDS * len(rows)
        return StepResult([self._result(row) for row in rows])

    def _result(self, row: Any) -> RowResult:
        if isinstance(row, Prefill) and not row.samples:
            return Prefilled()
        if not isinstance(row, Verify):
            assert isinstance(row, Prefill | Decode)
            return Sampled(self._draw(row.sequence_id))
        drawn = list[SampledToken]()
        for draft in (*row.draft, None):
            drawn.append(self._draw(row.sequence_id))
            if drawn[-1].token_id != draft:
                break
        return Verified(tuple(drawn))

    def _draw(self, sequence_id: SequenceId) -> SampledToken:
        index = self._n_tokens[sequence_id]
        self._n_tokens[sequence_id] = index + 1
        return SampledToken(self._script.token(sequence_id, index))


class Stopwatch:
    """The processor time of this thread in calls of methods, for each turn of a loop."""

    def __init__(self) -> None:
        self.turns: list[dict[str, float]] = [defaultdict(float)]
        self.longest_collection = 0.0
        self._collection_began = 0.0

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        began = time.thread_time()
        yield
        self.turns[-1][name] += 1e3 * (time.thread_time() - began)

    def watch(self, instance: object, method: str, name: str) -> None:
        """Time all calls of a method of the instance."""
        function = getattr(instance, method)

        def watched(*arguments: Any) -> Any:
            with self.timed(name):
                return function(*arguments)

        setattr(instance, method, watched)

    def collection(self, phase: str, info: dict[str, int]) -> None:
        """Time a garbage collection: a callback of `gc`."""
        if phase == "start":
            self._collection_began = time.thread_time()
        else:
            milliseconds = 1e3 * (time.thread_time() - self._collection_began)
            self.longest_collection = max(self.longest_collection, milliseconds)


def run(script: Script, n_tokens: int, n: int) -> Stopwatch:
    """Serve the request once, and take the times."""
    pool = BlockPool(2 * n_tokens // BLOCK_SIZE + n * (OUTPUT_TOKENS // BLOCK_SIZE + 3))
    store = KVStore(pool, RadixTree(pool, BLOCK_SIZE, hashes_blocks=True), BLOCK_SIZE)
    events, watch = list[OutputEvent](), Stopwatch()
    runner = ScriptedRunner(script)
    scheduler = Scheduler(
        store,
        output_factory(frozenset(), lambda _: Letters()),
        Limits(VOCABULARY, 2 * n_tokens, 2 * n_tokens, n, n, 2048),
        lambda: 7,
        Metrics(lambda: runner.seconds),
        drafts=DraftPolicy(store),
    )

    def deliver(step_events: list[OutputEvent]) -> None:
        events.extend(step_events)
        with watch.timed("deliver"):
            b"".join(events_frames(step_events))

    loop = EngineLoop(scheduler, runner, Inbox(), deliver, StorageBytes(0, (), 0))
    request = Request(
        "r", pack(script.prompt), OUTPUT_TOKENS, n=n, prediction=pack(script.prediction)
    )
    json = CALLS["submit"].json(request)
    with watch.timed("read the request"):
        (request,) = CALLS["submit"].arguments.validate_json(json)
    with watch.timed("prepare it"):
        prepared = scheduler.prepare(request)
    for name, instance, method in (
        ("add", scheduler, "add"),
        ("plan", scheduler, "plan"),
        ("of it: admit", scheduler, "_add_prefills"),
        ("of it: draft", scheduler.drafts, "add"),
        ("draft before", scheduler.drafts, "prefers_sync"),
        ("commit", scheduler, "commit"),
        ("the model's stand-in", runner, "submit"),
        ("the model's stand-in", runner, "collect"),
    ):
        watch.watch(instance, method, name)
    gc.collect()
    gc.freeze()
    gc.callbacks.append(watch.collection)
    scheduler.add(prepared)
    while not loop.is_idle:
        watch.turns.append(defaultdict(float))
        with watch.timed(TURN):
            loop.turn()
        watch.turns[-1][TURN] -= watch.turns[-1].pop("the model's stand-in", 0.0)
    gc.callbacks.remove(watch.collection)
    gc.unfreeze()
    if sum(event.finish_reason is not None for event in events) < n:
        raise RuntimeError("not all outputs have come")
    return watch


def measure(n_tokens: int, n: int, n_runs: int) -> Figures:
    """Serve the request several times. Raises RuntimeError if a run takes other turns."""
    script = Script(n_tokens, seed=1)
    watches = [run(script, n_tokens, n) for _ in range(n_runs)]
    longest = dict[str, float]()
    for turns in zip(*(watch.turns for watch in watches), strict=True):
        for name in turns[0]:
            longest[name] = max(longest.get(name, 0.0), min(turn[name] for turn in turns))
    longest["garbage collection"] = min(watch.longest_collection for watch in watches)
    return Figures(n_tokens, n, len(watches[0].turns), longest)


def table(all_figures: list[Figures]) -> Table:
    """A row for each part of the work."""
    columns = ("milliseconds", *(f"{figures.tokens:,} tokens" for figures in all_figures))
    rows = []
    for name in all_figures[-1].longest_milliseconds:
        row = (f"{figures.longest_milliseconds.get(name, 0.0):.1f}" for figures in all_figures)
        rows.append((name, *row))
    return Table(columns, tuple(rows))


def main(
    tokens: int = 120_000,
    n: int = 128,
    runs: int = 7,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure a request with short texts, and one with long ones."""
    all_figures = [measure(n_tokens, n, runs) for n_tokens in (SHORT_TOKENS, tokens)]
    show_figures(table(all_figures), all_figures, json_path)


if __name__ == "__main__":
    typer.run(main)
