"""What sampling costs compared with greedy: rows of one vocabulary, in one process.

    python -m load_tests.bench.sampling [--json PATH]

A call is building, evaluating and reading one step's tokens from logits that are there. The kinds
alternate, so that what else the machine does is the same for all; a ratio is of one round's times,
printed are medians over the rounds, and the least time. A "compiled" kind draws by a function of
`mx.compile`. On a CPU `--processor-time` counts the process's own, all threads together, where
others have the machine as well. "argmax" is MLX's own over all logits and nothing else, what a
greedy step needs at least when it is written down plainly.
"""

# ruff: noqa: E402 - MLX comes after the BLAS

import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from engine.mlx_backend.blas import load_blas
from engine.values.tokens import pack

load_blas()

import mlx.core as mx
import typer

from engine.core.step import NO_MASKS, Sampling
from engine.mlx_backend.loading.compiler import start_compiler
from engine.mlx_backend.loading.memory import activation_bytes
from engine.mlx_backend.sampling.draws import Draw, DrawParams, Kind, draw
from engine.mlx_backend.sampling.edits import SamplingRow
from engine.mlx_backend.sampling.sampler import DrawFunction, Sampler
from engine.values.request import SamplingParams
from engine.values.settings import EngineConfig
from load_tests.report import Table
from load_tests.terminal import show_figures

PROMPT_TOKENS, OUTPUT_TOKENS = 2000, 500
"""What penalties look at."""
WARM_ROUNDS = 3

KINDS = {
    "greedy": SamplingParams(temperature=0),
    "temperature 1": SamplingParams(),
    "temperature 0.7": SamplingParams(temperature=0.7),
    "top_p 0.9": SamplingParams(temperature=0.7, top_p=0.9),
    "top_k 20": SamplingParams(temperature=0.7, top_k=20),
    "top_k 20, top_p 0.95": SamplingParams(temperature=0.7, top_k=20, top_p=0.95),
    "min_p 0.05": SamplingParams(temperature=0.7, min_p=0.05),
    "penalties": SamplingParams(
        temperature=0, repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.1
    ),
    "temperature 0.7, penalties": SamplingParams(
        temperature=0.7, repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.1
    ),
    "greedy, logit_bias": SamplingParams(
        temperature=0, logit_bias=dict.fromkeys(range(0, 30_000, 100), 1.0)
    ),
    "greedy, logprobs": SamplingParams(temperature=0, top_logprobs=5),
}
MIXED = ("greedy", "temperature 0.7", "top_p 0.9", "top_k 20, top_p 0.95")
COMPILED = ("greedy", "temperature 1", "top_p 0.9", "top_k 20, top_p 0.95")


@dataclass(frozen=True, slots=True)
class Figures:
    kind: str
    median_milliseconds: float
    least_milliseconds: float
    over_argmax: float
    over_greedy: float


class CompiledDraws:
    """Draws by one compiled function for each kind."""

    def __init__(self) -> None:
        self._functions: dict[Kind, Callable[[mx.array, DrawParams], Draw]] = {}

    def __call__(self, kind: Kind, logits: mx.array, params: DrawParams) -> Draw:
        if kind not in self._functions:
            self._functions[kind] = mx.compile(partial(draw, kind))
        return self._functions[kind](logits, params)


class Batch:
    """Rows of some kinds in turn, that take note of what they sample."""

    def __init__(
        self, logits: mx.array, *kinds: SamplingParams, draw_with: DrawFunction = draw
    ) -> None:
        self._sampler = Sampler(logits.shape[1])
        self._sampler.draw_with = draw_with
        self._logits = logits
        of_rows = itertools.islice(itertools.cycle(kinds), len(logits))
        self._rows = [new_row(params, seed) for seed, params in enumerate(of_rows)]

    def step(self) -> None:
        drawn = self._sampler.sample(self._logits, self._rows, NO_MASKS, [])
        mx.eval(drawn.arrays())
        for row, token in zip(self._rows, drawn.read(), strict=True):
            assert token is not None
            row.accept(token.token_id)


def new_row(params: SamplingParams, seed: int) -> SamplingRow:
    prompt, output = tuple(range(PROMPT_TOKENS)), tuple(range(OUTPUT_TOKENS))
    has_penalties = params.repetition_penalty != 1.0
    seen = (prompt, output) if has_penalties else ((), ())
    return SamplingRow(Sampling(params, seed, OUTPUT_TOKENS, pack(seen[0]), seen[1]))


def measure(
    steps: Mapping[str, Callable[[], object]],
    clock: Callable[[], float],
    n_rounds: int,
) -> dict[str, list[float]]:
    """Seconds of each by a clock, round by round."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for done in range(-WARM_ROUNDS, n_rounds):
        for name, step in steps.items():
            start = clock()
            step()
            if done >= 0:
                seconds[name].append(clock() - start)
    return seconds


def figures_of(seconds: Mapping[str, list[float]]) -> list[Figures]:
    argmax, greedy = seconds["argmax"], seconds["greedy"]
    return [
        Figures(
            kind=kind,
            median_milliseconds=1e3 * statistics.median(of_kind),
            least_milliseconds=1e3 * min(of_kind),
            over_argmax=median_ratio(of_kind, argmax),
            over_greedy=median_ratio(of_kind, greedy),
        )
        for kind, of_kind in seconds.items()
    ]


def median_ratio(seconds: list[float], others: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(seconds, others, strict=True))


def table(all_figures: list[Figures]) -> Table:
    rows = (
        (
            figures.kind,
            f"{figures.median_milliseconds:.2f}",
            f"{figures.least_milliseconds:.2f}",
            f"{figures.over_argmax:.2f}",
            f"{figures.over_greedy:.2f}",
        )
        for figures in all_figures
    )
    head = ("kind", "ms", "least ms", "over argmax", "over greedy")
    return Table(head, tuple(rows))


def main(
    rows: int = 16,
    vocabulary: int = 151_936,
    rounds: int = 31,
    processor_time: bool = False,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure the kinds of sampling in turn, with kernels as an engine builds them."""
    if (compiler := start_compiler()) is not None:
        compiler.problem()
    clock = time.process_time if processor_time else time.perf_counter
    mx.set_cache_limit(activation_bytes(EngineConfig("").step_tokens, rows, vocabulary))
    logits = 4 * mx.random.normal((rows, vocabulary), key=mx.random.key(0))
    steps: dict[str, Callable[[], object]] = {
        "argmax": lambda: mx.argmax(logits, axis=1).tolist(),
        **{kind: Batch(logits, params).step for kind, params in KINDS.items()},
        "mixed": Batch(logits, *(KINDS[kind] for kind in MIXED)).step,
        **{
            f"{kind}, compiled": Batch(logits, KINDS[kind], draw_with=CompiledDraws()).step
            for kind in COMPILED
        },
    }
    all_figures = figures_of(measure(steps, clock, rounds))
    show_figures(table(all_figures), all_figures, json_path)


if __name__ == "__main__":
    typer.run(main)
