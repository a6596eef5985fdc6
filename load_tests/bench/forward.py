"""One step of the engine over mlx-lm's bare forward, in one process: `python -m
load_tests.bench.forward [--shape thin] [--rows 8] [--context 4096] [--json PATH]`.

So many rows decode at once, on one of the load tests' checkpoints, after unique prompts of so many
tokens: nothing is shared.
The engine is the daemon's own but for its thread, and is turned by hand; the bare model decodes as
many rows over mlx-lm's own KV caches, argmax and evaluation included. Both take turns of some steps
each, and their contexts grow alike. The ratio is the median of the rounds' own ratios.
"""

import itertools
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from engine.api import Telemetry
from engine.launch import assemble
from engine.loop.inbox import Inbox
from engine.mlx_backend.backend import load_backend
from engine.mlx_backend.cpu.blas import load_blas
from engine.scheduling.submission import prepare
from engine.types.output import OutputEvent
from engine.types.request import Request, SamplingParams
from engine.types.settings import EngineConfig
from load_tests.conditions import observe
from load_tests.report import Table
from load_tests.shapes import Shape, token_bytes
from server.metrics.metrics import EngineTelemetry

if TYPE_CHECKING:
    from load_tests.bench.bare import BareModel

ROWS = (1, 8, 16, 32)
CONTEXTS = (256,)
STEPS = 8
"""Of either side in one round."""
WARM_UP_ROUNDS = 2
MAX_TOKENS = 2048  # more than any row says
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Figures:
    """Medians over the rounds: milliseconds a step, and the engine's over the bare model's."""

    rows: int
    context_tokens: int
    engine_milliseconds: float
    bare_milliseconds: float
    ratio: float
    least_ratio: float
    greatest_ratio: float


class TurnedEngine:
    """The daemon's engine without its thread."""

    def __init__(self, checkpoint: Path, max_running: int, kv_bytes: int) -> None:
        config = EngineConfig(
            str(checkpoint),
            kv_cache_bytes=kv_bytes,
            max_running=max_running,
            max_prompt_share=1.0,  # the first rows say little while the others' prompts come
        )
        telemetry: Telemetry = EngineTelemetry()
        backend = load_backend(config, _silent)
        self._events: list[OutputEvent] = []
        parts = assemble(backend, config, telemetry, _silent, Inbox(), self._events.extend)
        self._loop, self._limits = parts.loop, parts.limits
        self._vocab_size = parts.card.vocab_size
        self._names = itertools.count()

    def begin(self, rows: int, prompt_tokens: int) -> None:
        """Abort what runs, and turn until each of so many new requests has said something."""
        self._loop.abort_all()
        while not self._loop.is_idle:
            self._loop.turn()
        self._events.clear()
        prompts = [self.unique_prompt(prompt_tokens) for _ in range(rows)]
        self.wait_for({self.submit(prompt, MAX_TOKENS) for prompt in prompts})

    def unique_prompt(self, n_tokens: int) -> tuple[int, ...]:
        """Of random tokens, as no other one."""
        return tuple(random.Random(next(self._names)).choices(range(self._vocab_size), k=n_tokens))

    def submit(self, prompt: tuple[int, ...], max_tokens: int) -> str:
        """The request's name."""
        request = Request(f"r{next(self._names)}", prompt, max_tokens, GREEDY, ignore_eos=True)
        self._loop.submit(prepare(request, self._limits), time.monotonic())
        return request.id

    def wait_for(self, names: set[str]) -> None:
        """Turn until each of these requests has said something."""
        while names:
            self._loop.turn()
            names -= {event.request_id for event in self._events if event.token_ids}

    def copied_blocks(self) -> int:
        """Blocks that were copied because a prompt goes on within one that it found."""
        return self._loop.stats.cache.prefix_copies

    def turn(self, steps: int) -> float:
        """Seconds until so many steps have been taken, and the device has nothing left to do."""
        import mlx.core as mx  # noqa: PLC0415 - the BLAS must come first

        start = time.perf_counter()
        for _ in range(steps):
            self._loop.turn()
        mx.synchronize()  # a step that was launched ahead is this round's
        return time.perf_counter() - start

    def seconds(self, steps: int) -> float:
        """For each row to say so many tokens. Raises RuntimeError where one does not."""
        said = sum(len(event.token_ids) for event in self._events)
        rows = len(self._loop.live())
        seconds = self.turn(steps)
        told = sum(len(event.token_ids) for event in self._events) - said
        if told != rows * steps:
            raise RuntimeError(f"{rows} rows said {told} tokens in {steps} steps")
        return seconds


def _silent(line: str) -> None:
    """Nobody reads how loading goes."""


def measure(
    engine: TurnedEngine, bare: "BareModel", rows: int, context_tokens: int, rounds: int
) -> Figures:
    """Let the two take turns, the first rounds uncounted."""
    engine.begin(rows, context_tokens)
    bare.begin(rows, context_tokens)
    taken = itertools.islice(_rounds(engine, bare), WARM_UP_ROUNDS, WARM_UP_ROUNDS + rounds)
    return figures_of(rows, context_tokens, list(taken))


def figures_of(rows: int, context_tokens: int, taken: Sequence[tuple[float, float]]) -> Figures:
    """Of rounds, in seconds of the engine's and of the bare model's."""
    ratios = [ours / theirs for ours, theirs in taken]
    return Figures(
        rows=rows,
        context_tokens=context_tokens,
        engine_milliseconds=1e3 * statistics.median(ours for ours, _ in taken) / STEPS,
        bare_milliseconds=1e3 * statistics.median(theirs for _, theirs in taken) / STEPS,
        ratio=statistics.median(ratios),
        least_ratio=min(ratios),
        greatest_ratio=max(ratios),
    )


def _rounds(engine: TurnedEngine, bare: "BareModel") -> Iterator[tuple[float, float]]:
    """Seconds of either side, who take turns at going first."""
    while True:
        ours = engine.seconds(STEPS)
        yield ours, sum(bare.step_seconds() for _ in range(STEPS))
        theirs = sum(bare.step_seconds() for _ in range(STEPS))
        yield engine.seconds(STEPS), theirs


def table(all_figures: list[Figures]) -> Table:
    """A row for each number of rows."""
    columns = ("rows", "context", "engine ms", "bare ms", "engine / bare", "least", "greatest")
    rows = (
        (
            str(figures.rows),
            f"{figures.context_tokens:,}",
            f"{figures.engine_milliseconds:.2f}",
            f"{figures.bare_milliseconds:.2f}",
            f"{figures.ratio:.3f}",
            f"{figures.least_ratio:.2f}",
            f"{figures.greatest_ratio:.2f}",
        )
        for figures in all_figures
    )
    return Table(columns, tuple(rows))


def main(
    rounds: int = 24,
    shape: Annotated[Shape, typer.Option(help="Of the checkpoint; see shapes.py.")] = "qwen3",
    rows: Annotated[list[int] | None, typer.Option(min=1, help="1, 8, 16 and 32")] = None,
    context: Annotated[list[int] | None, typer.Option(min=2, help="Of a prompt: 256")] = None,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure each number of rows behind each context."""
    blas = load_blas()
    from load_tests.bench.bare import BareModel  # noqa: PLC0415 - the BLAS must come first
    from load_tests.checkpoint import checkpoint  # noqa: PLC0415

    model = checkpoint(shape)
    conditions = observe(0, (), blas.name or "the system's")
    rows, context = rows or list(ROWS), context or list(CONTEXTS)
    row_tokens = max(context) + MAX_TOKENS
    engine = TurnedEngine(model, max(rows), max(rows) * row_tokens * token_bytes(shape))
    bare = BareModel(model)
    all_figures = [measure(engine, bare, n, tokens, rounds) for tokens in context for n in rows]
    console = Console(width=100)
    console.print(table(all_figures).rich())
    for line in conditions.lines():
        console.print(line, highlight=False)
    if json_path is not None:
        found = {"conditions": asdict(conditions), "rows": [asdict(one) for one in all_figures]}
        json_path.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    typer.run(main)
