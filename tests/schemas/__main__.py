"""Many schemas: `python -m tests.schemas generated --schemas 3000 --seed 0`; the public test suite:
`python -m tests.schemas suite DIRECTORY`."""

import asyncio
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from engine.launch import launch
from engine.values.settings import EngineConfig
from tests.checkpoints import SHALLOW, write_family
from tests.schemas.answers import answers_conform
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
    directory: Annotated[Path, typer.Argument(help="Such as tests/draft2020-12 of a clone.")],
) -> None:
    """Read the public JSON-Schema test suite. Fails if an invalid instance is accepted."""
    if not report(directory):
        raise typer.Exit(1)


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
