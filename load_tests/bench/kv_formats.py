"""What a KV format costs and gains: `python -m load_tests.bench.kv_formats [--format full --format
q8] [--shape real] [--rows 8] [--context 4096]`.

For each format: the bytes of a token, what it changes of the model's predictions, and the time of a
decode step, with unique prompts of that many tokens. The formats take turns of some steps each, and
the ratio to the first format is the median of the rounds' own ratios. With one row mlx-lm's own
cache takes part, as with its `kv_bits=8`. Then prompts that are twice as many as the first format's
cache holds are asked for in turn, over caches of equal bytes: the share of their tokens that was
found, and the time for all.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated

import typer
from mlx_lm.utils import load_tokenizer
from rich.console import Console

from engine.mlx_backend.blas import load_blas
from engine.mlx_backend.loading.format_check import TEXT, compare
from engine.values.settings import EngineConfig, KVFormat
from load_tests.checkpoint import checkpoint
from load_tests.conditions import observe
from load_tests.report import Table
from load_tests.shapes import Shape
from measuring.engine_step import STEPS, EngineHarness, generated_tokens

PEER_BITS = 8
PROMPTS, PROMPT_TOKENS, TURNS = 16, 512, 3
"""Prompts over which caches of equal bytes are compared, and how often each is asked for."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What decodes: an engine with a format, or mlx-lm's model with a quantized cache."""

    name: str
    bytes_per_token: float
    divergence: float | None  # from predictions in full precision
    decode_seconds: Callable[[int], float]  # takes the number of steps


def subjects(
    engines: dict[KVFormat, EngineHarness],
    rows: int,
    context: int,
    max_tokens: int,
    tokens: list[int],
) -> Iterator[Subject]:
    """Each engine, with rows of new prompts of `context` tokens; for one row, mlx-lm's cache in 8
    bits, too. `tokens` are the text whose predictions are compared.
    """
    for format, engine in engines.items():
        engine.begin(rows, context, max_tokens)
        card = engine.card
        yield Subject(format, card.kv_bytes_per_token, card.kv_divergence, engine.decode_seconds)
    bare = next(iter(engines.values())).bare
    if rows == 1:
        quality = compare(bare.logits(tokens), bare.logits(tokens, PEER_BITS))
        bare.begin(1, context, kv_bits=PEER_BITS)
        peer_bytes = bare.bytes_per_token(context - 1)

        def seconds(n_steps: int) -> float:
            return sum(bare.step_seconds() for _ in range(n_steps))

        yield Subject(f"mlx-lm, {PEER_BITS} bits", peer_bytes, quality.divergence, seconds)


def step_table(measured: list[Subject], rows: int, context: int, rounds: int) -> Table:
    """A row for each subject, with the time of a decode step."""
    for subject in measured:
        subject.decode_seconds(STEPS)  # not counted: shapes are traced
    times: dict[str, list[float]] = {subject.name: [] for subject in measured}
    for turn in range(rounds):
        for subject in measured if turn % 2 else reversed(measured):
            times[subject.name].append(subject.decode_seconds(STEPS) / STEPS)
    first = times[measured[0].name]
    lines = []
    for subject in measured:
        own = times[subject.name]
        ratios = [mine / base for mine, base in zip(own, first, strict=True)]
        lines.append(
            (
                subject.name,
                f"{subject.bytes_per_token:,.0f}",
                "" if subject.divergence is None else f"{subject.divergence:.2g}",
                f"{statistics.median(own) * 1e3:.2f}",
                f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
            )
        )
    step = f"step ms, {rows} rows of {context:,}"
    return Table(("format", "bytes a token", "KL", step, "of the first"), tuple(lines))


def ask_in_turn(engine: EngineHarness, prompts: int, prompt_tokens: int, turns: int) -> float:
    """Ask for a token after each of some new prompts, in turn and so many times. Returns the
    seconds for all.
    """
    asked = [engine.unique_prompt(prompt_tokens) for _ in range(prompts)]
    began = time.perf_counter()
    for prompt in asked * turns:
        engine.wait_for({engine.submit(prompt, max_tokens=1)})
    return time.perf_counter() - began


def reuse_table(config: EngineConfig, formats: list[KVFormat]) -> Table:
    """A row for each format, with what caches of equal bytes find of prompts asked for in turn."""
    lines, first_bytes = [], 0
    for format in formats:
        own = replace(config, kv_format=format)
        engine = EngineHarness(own, PROMPTS // 2, PROMPT_TOKENS)
        bytes_per_token = engine.card.kv_bytes_per_token
        first_bytes = first_bytes or bytes_per_token
        if bytes_per_token != first_bytes:
            row_tokens = PROMPT_TOKENS * first_bytes // bytes_per_token
            engine = EngineHarness(own, PROMPTS // 2, row_tokens)
        seconds = ask_in_turn(engine, PROMPTS, PROMPT_TOKENS, TURNS)
        tokens = f"{engine.card.arena_tokens:,}"
        lines.append((format, tokens, f"{engine.hit_share():.0%}", f"{seconds:.1f}"))
    asked = f"{PROMPTS} prompts of {PROMPT_TOKENS}, {TURNS} times: s"
    return Table(("format", "tokens in the cache", "found", asked), tuple(lines))


def main(
    rounds: int = 16,
    shape: Annotated[Shape, typer.Option(help="Of the checkpoint; see shapes.py.")] = "qwen3",
    formats: Annotated[list[KVFormat] | None, typer.Option("--format", help="full and q8")] = None,
    rows: Annotated[list[int] | None, typer.Option(min=1, help="1 and 8")] = None,
    context: Annotated[list[int] | None, typer.Option(min=2, help="1024 and 4096")] = None,
) -> None:
    """Measure each number of rows after each context."""
    conditions = observe(0, (), load_blas().name or "the system's")
    rows, context = rows or [1, 8], context or [1024, 4096]
    formats = formats or [KVFormat.FULL, KVFormat.Q8]
    config, console = EngineConfig(str(checkpoint(shape))), Console(width=110)
    max_tokens = generated_tokens(rounds, max(rows), max(context), config.step_tokens)
    row_tokens = max(context) + max_tokens
    engines = {
        format: EngineHarness(replace(config, kv_format=format), max(rows), row_tokens)
        for format in formats
    }
    text = load_tokenizer(checkpoint(shape)).encode(TEXT)
    for tokens in context:
        for n in rows:
            measured = list(subjects(engines, n, tokens, max_tokens, text))
            console.print(step_table(measured, n, tokens, rounds).rich())
    engines.clear()
    console.print(reuse_table(config, formats).rich())
    for line in conditions.lines():
        console.print(line, highlight=False)


if __name__ == "__main__":
    typer.run(main)
