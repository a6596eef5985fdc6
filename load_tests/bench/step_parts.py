"""Where the time of a decode step goes on a CPU, and what a prompt takes.

    python -m load_tests.bench.step_parts [--model smollm2] [--rows 1] [--rows 8] [--rounds 10]

Rows decode after unique prompts on the daemon's engine without its thread. Then parts of the model
are left out, one at a time, in engines of their own: attention returns its queries, and a product
of the layers returns its input, repeated or cut to the length of its output. What such an engine
generates means nothing. Steps are compiled, as far as the daemon would compile them. Parts overlap,
so what they save together need not be the sum. The product that makes the logits is never left out.

Cells are the least of all rounds, in milliseconds a step. The prompt's row is that of a whole
engine: seconds until one unique prompt of that many tokens has a first token.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Annotated
from unittest.mock import patch

import mlx.core as mx
import typer
from mlx.nn.layers.linear import Linear
from rich.console import Console

from engine.mlx_backend.blas import load_blas
from engine.mlx_backend.cpu.cascade import CascadePlan
from engine.mlx_backend.model.patches import TransposedWeights
from engine.values.settings import EngineConfig
from load_tests.checkpoint import served_checkpoint
from load_tests.conditions import observe
from load_tests.report import Table
from measuring.engine_step import STEPS, WARM_UP_ROUNDS, EngineHarness, generated_tokens

ATTENTION, PRODUCTS = "attention", "products of the layers"
LEFT_OUT: dict[str, tuple[str, ...]] = {
    "whole": (),
    f"without {ATTENTION}": (ATTENTION,),
    f"without {PRODUCTS}": (PRODUCTS,),
    "without both": (ATTENTION, PRODUCTS),
}
PROMPTS = 3
"""Prompts of which the fastest counts."""


def _resized(layer: Linear, x: mx.array) -> mx.array:
    """The input in the shape of the layer's output."""
    wanted = layer.weight.shape[0]
    copies = -(-wanted // x.shape[-1])
    return mx.concatenate([x] * copies, axis=-1)[..., :wanted]


@contextmanager
def _without(parts: Sequence[str]) -> Iterator[None]:
    """Within the context steps that are traced lack these parts."""

    @contextmanager
    def resized(weights: TransposedWeights, rows: int) -> Iterator[None]:
        with patch.object(Linear, "__call__", _resized):
            yield

    with ExitStack() as patches:
        if ATTENTION in parts:
            patches.enter_context(
                patch.object(CascadePlan, "attend", lambda plan, queries, *arguments: queries)
            )
        if PRODUCTS in parts:
            patches.enter_context(patch.object(TransposedWeights, "used", resized))
        yield


def _least_ms(engine: EngineHarness, rows: int, context: int, rounds: int, most: int) -> float:
    engine.begin(rows, context, most)
    for _ in range(WARM_UP_ROUNDS):
        engine.decode_seconds(STEPS)
    return min(engine.decode_seconds(STEPS) for _ in range(rounds)) / STEPS * 1e3


def _prompt_seconds(engine: EngineHarness, n_tokens: int) -> float:
    """The least of some prompts, after one that does not count."""
    found = list[float]()
    for _ in range(1 + PROMPTS):
        start = time.perf_counter()
        engine.begin(1, n_tokens, 1)
        found.append(time.perf_counter() - start)
    return min(found[1:])


def main(
    model: Annotated[str, typer.Option(help="A model, or a shape of random weights.")] = "smollm2",
    rows: Annotated[list[int] | None, typer.Option(min=1, help="1 and 8")] = None,
    context: Annotated[int, typer.Option(min=2, help="Tokens of a row's prompt.")] = 300,
    prompt: Annotated[int, typer.Option(min=2, help="Tokens of the prompt.")] = 1500,
    rounds: int = 10,
) -> None:
    """Measure each number of rows, whole and with parts left out."""
    conditions = observe(0, (), load_blas().name or "the system's")
    rows, config = rows or [1, 8], EngineConfig(str(served_checkpoint(model)))
    most = generated_tokens(rounds, max(rows), context, config.step_tokens)
    cells = list[tuple[str, ...]]()
    prompt_seconds = 0.0
    for name, parts in LEFT_OUT.items():
        engine = EngineHarness(config, max(rows), max(context + most, prompt + 1))
        with _without(parts):
            found = [_least_ms(engine, n, context, rounds, most) for n in rows]
        cells.append((name, *(f"{milliseconds:.1f}" for milliseconds in found)))
        prompt_seconds = prompt_seconds or _prompt_seconds(engine, prompt)
    console = Console(width=100)
    console.print(Table(("a step", *(f"{n} rows" for n in rows)), tuple(cells)).rich())
    console.print(f"a prompt of {prompt:,} tokens: {prompt_seconds:.2f} s")
    for line in conditions.lines():
        console.print(line, highlight=False)


if __name__ == "__main__":
    typer.run(main)
