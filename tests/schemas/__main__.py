"""Many schemas: `python -m tests.schemas generated --schemas 3000 --seed 0`; the public test suite:
`python -m tests.schemas suite DIRECTORY`; what generators write, on a real model: `python -m
tests.schemas corpora`."""

import asyncio
import random
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from transformers import AutoTokenizer

from engine.launch import launch
from engine.mlx_backend.loading.locate import find_checkpoint
from engine.values.settings import EngineConfig
from tests.checkpoints import SHALLOW, write_family
from tests.grammars import demo_tokenizer
from tests.schemas.answers import Prompt, answers_conform, corpora_conform
from tests.schemas.corpora import taken
from tests.schemas.suite import report

app = typer.Typer()


@app.command()
def generated(
    schemas: Annotated[int, typer.Option(help="How many.")] = 3000,
    seed: Annotated[int, typer.Option(help="Seed of the first.")] = 0,
    max_tokens: Annotated[int, typer.Option(help="Longer answers are cut.")] = 200,
) -> None:
    """Let a random model answer under generated schemas, and validate what it says."""
    ends = asyncio.run(_answer(range(seed, seed + schemas), max_tokens))
    print(f"seeds {seed} to {seed + schemas - 1}: {ends}")


@app.command()
def suite(
    directory: Annotated[
        Path, typer.Argument(help="tests/draft2020-12 of a clone, or maskbench/data.")
    ],
) -> None:
    """Read the public JSON-Schema test suite, or MaskBench. Fails if an invalid instance is
    accepted.
    """
    if not report(directory):
        raise typer.Exit(1)


@app.command()
def corpora(
    model: Annotated[str, typer.Option(help="A checkpoint, or a name.")] = "smollm2",
    schemas: Annotated[int, typer.Option(help="How many.")] = 200,
    seed: Annotated[int, typer.Option(help="Draws them, and the answers.")] = 0,
    first: Annotated[int, typer.Option(help="Begin with this one of those drawn.")] = 0,
    last: Annotated[int | None, typer.Option(help="End before this one.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Longer answers are cut.")] = 120,
) -> None:
    """Let a real model answer under schemas that generators wrote, and validate what it says."""
    checkpoint = find_checkpoint(model, download=True)
    prompts = _prompts(checkpoint, schemas, seed)[first:last]
    ends = asyncio.run(_corpora(checkpoint, prompts, max_tokens))
    print(f"{len(prompts)} of {schemas} schemas by seed {seed}: {ends}")


def _prompts(checkpoint: Path, count: int, seed: int) -> list[Prompt]:
    """Schemas that a grammar takes, each with a user's request for a value of its type."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    schemas = sorted(taken(demo_tokenizer(2)).items())
    prompts = []
    for name, schema in random.Random(seed).sample(schemas, count):
        message = {"role": "user", "content": f"Write one short example as JSON of {name}."}
        tokens = tokenizer.apply_chat_template(
            [message], add_generation_prompt=True, return_dict=False
        )
        prompts.append(Prompt(name, schema, tokens))
    return prompts


async def _corpora(checkpoint: Path, prompts: list[Prompt], max_tokens: int) -> dict[str, int]:
    config = EngineConfig(model=str(checkpoint), kv_cache_bytes=256 << 20, max_running=32)
    engine = await launch(config, lambda line: None)
    try:
        return dict(await corpora_conform(engine, prompts, max_tokens))
    finally:
        await engine.drain(0.0)


async def _answer(seeds: range, max_tokens: int) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as parent:
        model = write_family(SHALLOW, Path(parent))
        config = EngineConfig(model=str(model), kv_cache_bytes=16 << 20, max_running=32)
        engine = await launch(config, lambda line: None)
        try:
            return dict(await answers_conform(engine, seeds, max_tokens))
        finally:
            await engine.drain(0.0)


if __name__ == "__main__":
    app()
