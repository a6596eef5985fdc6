"""What each KV format changes of SmolLM2: `python -m tests.golden.real_figures [--format q8]
[--tokens 5000] [--prompts 50]`.

Predictions of the tokens of Python's documentation, in pieces of 1,000, are compared with those of
mlx-lm's own model in float32, and greedy answers with the ones in full precision. `warm` counts the
answers that are the same when all is sent again, with its prompt and its first answer cached.
"""

# ruff: noqa: E402 - MLX comes after the BLAS

from collections.abc import Sequence
from typing import Annotated

from engine.mlx_backend.blas import load_blas

load_blas()

import mlx.core as mx
import numpy as np
import typer
from rich.console import Console

from engine.mlx_backend.loading.format_check import compare
from engine.mlx_backend.loading.locate import find_checkpoint
from engine.mlx_backend.loading.selfcheck import Chunk, Row, logits_through_storage
from engine.mlx_backend.model.patches import NO_ADAPTER
from engine.values.settings import KVFormat
from load_tests.conditions import observe
from load_tests.report import Table
from tests.golden.real_prompts import Prompt, Writer
from tests.golden.real_reference import (
    Answer,
    RealDaemon,
    Reference,
    Scores,
    little_cache,
    perplexity,
    stored_as,
)
from tests.offline import Room, Served, load

ROOM = Room(480, block_size=32, max_running=16, step_tokens=512)
PIECE_TOKENS, CHUNK_TOKENS = 1000, 500


def stored_logits(served: Served, tokens: Sequence[int]) -> mx.array:
    """The logits after each token, `[tokens, vocabulary]`, with K and V as they are stored."""
    starts = range(0, len(tokens), CHUNK_TOKENS)
    bounds = [(start, min(start + CHUNK_TOKENS, len(tokens))) for start in starts]
    steps = [[Chunk(0, start, stop, stop - start)] for start, stop in bounds]
    row = Row(tokens, NO_ADAPTER)
    model, execution = served.loaded.model, served.execution
    return logits_through_storage(model, served.layout, execution, [row], steps)


def prediction_figures(
    reference: Reference, models: dict[KVFormat, Served], n_tokens: int
) -> dict[KVFormat, tuple[str, str, str]]:
    """Of each format: the divergence, the share of equal next tokens, and the perplexity with
    what the format changes of mlx-lm's.
    """
    text = reference.writer.documentation(n_tokens)
    pieces = [text[start : start + PIECE_TOKENS] for start in range(0, n_tokens, PIECE_TOKENS)]
    own = list[float]()
    found = {kv_format: list[float]() for kv_format in models}
    divergence, agreement = dict.fromkeys(models, 0.0), dict.fromkeys(models, 0.0)
    for piece in pieces:
        expected = np.concatenate(list(reference.logits(piece[:-1])))
        own += Scores.of([expected], piece[1:]).logprobs
        share = len(expected) / (n_tokens - len(pieces))
        for kv_format, served in models.items():
            logits = stored_logits(served, piece[:-1])
            quality = compare(mx.array(expected), logits)
            divergence[kv_format] += quality.divergence * share
            agreement[kv_format] += quality.agreement * share
            found[kv_format] += Scores.of([np.array(logits)], piece[1:]).logprobs
    figures = {}
    for kv_format, logprobs in found.items():
        change = perplexity(logprobs) / perplexity(own) - 1
        figures[kv_format] = (
            f"{divergence[kv_format]:.2g}",
            f"{agreement[kv_format]:.2%}",
            f"{perplexity(logprobs):.4f} ({change:+.4%})",
        )
    return figures


def answer_figures(
    models: dict[KVFormat, Served], prompts: Sequence[Prompt]
) -> dict[KVFormat, tuple[str, str]]:
    """Of each format: how many cold answers are those in full precision, and how many warm answers
    are the cold ones.
    """
    full: dict[Prompt, list[Answer]] | None = None
    figures = {}
    for kv_format, served in models.items():
        daemon = RealDaemon(served, ROOM)
        cold = daemon.answers(prompts)
        warm = daemon.answers(prompts)
        full = cold if full is None else full
        as_full = sum(cold[prompt] == full[prompt] for prompt in prompts)
        as_cold = sum(warm[prompt] == cold[prompt] for prompt in prompts)
        figures[kv_format] = (f"{as_full} of {len(prompts)}", f"{as_cold} of {len(prompts)}")
    return figures


def main(
    formats: Annotated[list[KVFormat] | None, typer.Option("--format", help="All.")] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Of the documentation.")] = 5000,
    prompts: Annotated[int, typer.Option(min=1, max=100, help="Of the hundred.")] = 50,
) -> None:
    """Print a table with a row for full precision, and one for each format."""
    names = (
        [KVFormat.F16, KVFormat.BF16, KVFormat.Q8, KVFormat.K8V4] if formats is None else formats
    )
    checkpoint = find_checkpoint("smollm2", download=True)
    with little_cache():
        reference, full = Reference.of(checkpoint), load(checkpoint)
        models = {name: stored_as(full, name) for name in (KVFormat.FULL, *names)}
        predictions = prediction_figures(reference, models, tokens)
        hundred = Writer(reference.tokenizer, lambda prompt: "It is a good question.").hundred()
        answers = answer_figures(models, hundred[:: len(hundred) // prompts][:prompts])
    table = Table(
        ("kv_format", "KL", "same next token", "perplexity", "answers as full", "warm as cold"),
        tuple((name, *predictions[name], *answers[name]) for name in models),
    )
    console = Console(width=110)
    console.print(table.rich())
    for line in observe(0, (), load_blas().name or "the system's").lines():
        console.print(line, highlight=False)


if __name__ == "__main__":
    typer.run(main)
