"""How long one request of long texts holds the engine thread, without a model.

    python -m load_tests.bench.long_texts [--tokens 120000] [--n 128] [--json PATH]

The prompt and the prediction have the given number of tokens, and n outputs are made of them. Each
follows the prediction, leaves it, repeats a part of the prompt and then another part of the
prediction. A stand-in for the runner returns their tokens at once. Between two of its calls the
engine thread works: the time of each part of that work is its processor time, in the step where it
was longest. The first row is what the other threads do before.

The same request with short texts has the cost of n outputs as such.
"""

import gc
import random
import time
from collections import deque
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


@dataclass(frozen=True, slots=True)
class Figures:
    """Milliseconds of the processor. `longest` is by part of a turn, the longest turn of each."""

    tokens: int
    n: int
    turns: int
    read_milliseconds: float
    prepare_milliseconds: float
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
    """Returns the script's tokens at once."""

    def __init__(self, script: Script) -> None:
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
        return StepResult([self._result(row) for row in self._plans.popleft().rows])

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
    """The longest processor time of this thread in calls of methods."""

    def __init__(self) -> None:
        self.longest: dict[str, float] = {}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        began = time.thread_time()
        yield
        seconds = time.thread_time() - began
        self.longest[name] = max(self.longest.get(name, 0.0), 1e3 * seconds)

    def watch(self, instance: object, method: str, name: str) -> None:
        """Time all calls of a method of the instance."""
        function = getattr(instance, method)

        def watched(*arguments: Any) -> Any:
            with self.timed(name):
                return function(*arguments)

        setattr(instance, method, watched)


def measure(n_tokens: int, n: int) -> Figures:
    """Serve the request, and take the times."""
    script = Script(n_tokens, seed=1)
    pool = BlockPool(2 * n_tokens // BLOCK_SIZE + n * (OUTPUT_TOKENS // BLOCK_SIZE + 3))
    store = KVStore(pool, RadixTree(pool, BLOCK_SIZE, hashes_blocks=True), BLOCK_SIZE)
    scheduler = Scheduler(
        store,
        output_factory(frozenset(), lambda _: Letters()),
        Limits(VOCABULARY, 2 * n_tokens, 2 * n_tokens, n, n, 2048),
        lambda: 7,
        Metrics(time.monotonic),
        drafts=DraftPolicy(store),
    )
    events, watch = list[OutputEvent](), Stopwatch()
    runner = ScriptedRunner(script)
    loop = EngineLoop(scheduler, runner, Inbox(), events.extend, StorageBytes(0, (), 0))
    request = Request(
        "r", pack(script.prompt), OUTPUT_TOKENS, n=n, prediction=pack(script.prediction)
    )
    json = CALLS["submit"].json(request)
    with watch.timed("read"):
        (request,) = CALLS["submit"].arguments.validate_json(json)
    with watch.timed("prepare"):
        prepared = scheduler.prepare(request)
    read, prepare = watch.longest.pop("read"), watch.longest.pop("prepare")
    for name, instance, method in (
        ("add", scheduler, "add"),
        ("plan", scheduler, "plan"),
        ("of it: admit", scheduler, "_add_prefills"),
        ("of it: draft", scheduler.drafts, "add"),
        ("draft before", scheduler.drafts, "prefers_sync"),
        ("commit", scheduler, "commit"),
    ):
        watch.watch(instance, method, name)
    gc.collect()
    gc.freeze()
    scheduler.add(prepared)
    turns = 0
    while not loop.is_idle:
        loop.turn()
        turns += 1
    if len(events) < n:
        raise RuntimeError("not all outputs have come")
    return Figures(n_tokens, n, turns, read, prepare, watch.longest)


def table(all_figures: list[Figures]) -> Table:
    """A row for each part of the work."""
    columns = ("milliseconds", *(f"{figures.tokens:,} tokens" for figures in all_figures))
    rows = [
        ("read the request", *(f"{each.read_milliseconds:.1f}" for each in all_figures)),
        ("prepare it", *(f"{each.prepare_milliseconds:.1f}" for each in all_figures)),
    ]
    for name in all_figures[0].longest_milliseconds:
        row = (f"{figures.longest_milliseconds.get(name, 0.0):.1f}" for figures in all_figures)
        rows.append((name, *row))
    return Table(columns, tuple(rows))


def main(
    tokens: int = 120_000,
    n: int = 128,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure a request with short texts, and one with long ones."""
    all_figures = [measure(n_tokens, n) for n_tokens in (SHORT_TOKENS, tokens)]
    show_figures(table(all_figures), all_figures, json_path)


if __name__ == "__main__":
    typer.run(main)
