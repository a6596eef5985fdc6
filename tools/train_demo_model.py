"""Trains a demonstration model for Rootstock, and scores it.

python -m tools.train_demo_model train      goes on if interrupted
python -m tools.train_demo_model score      the held-out prompts, through the daemon's engine
"""

import os
from itertools import islice
from pathlib import Path
from typing import Annotated

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # two threads train

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from engine.mlx_backend.blas import load_blas

TRAINED = Path("build/demo-model")
_SAVE_EVERY = 100

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
Directory = Annotated[Path, typer.Option(help="The checkpoint directory.")]


@app.command()
def train(
    directory: Directory = TRAINED,
    state: Annotated[Path, typer.Option(help="Where an interrupted run goes on.")] = Path(
        "build/demo-model-state.safetensors"
    ),
    steps: Annotated[int, typer.Option(min=200)] = 5000,
    seed: int = 0,
) -> None:
    """Train from nothing, or go on; then write the checkpoint, score it and write its README."""
    load_blas()
    import mlx.core as mx  # noqa: PLC0415 - MLX comes after the BLAS

    from tools.demo_model.publish import write_checkpoint  # noqa: PLC0415
    from tools.demo_model.tokens import train_tokenizer  # noqa: PLC0415
    from tools.demo_model.train import Trainer, batches  # noqa: PLC0415
    from tools.demo_model.words import split_words  # noqa: PLC0415

    mx.set_default_device(mx.cpu)
    words, _ = split_words()
    tokenizer = train_tokenizer(words, seed)
    trainer = Trainer(steps, seed)
    state.parent.mkdir(parents=True, exist_ok=True)
    if state.exists():
        trainer.resume(state)
    with _progress() as progress:
        bar = progress.add_task("training", total=steps, completed=trainer.step, loss=float("nan"))
        todo = islice(batches(tokenizer, words, seed, trainer.step), steps - trainer.step)
        for halves in todo:
            loss = trainer.learn(halves)
            progress.update(bar, completed=trainer.step, loss=loss)
            if trainer.step % _SAVE_EVERY == 0:
                trainer.save(state)
    write_checkpoint(directory, trainer.model, tokenizer)
    score(directory, seed)


@app.command()
def score(directory: Directory = TRAINED, seed: int = 0) -> None:
    """Ask the held-out prompts and write the scores into the model's README."""
    from tools.demo_model.publish import write_readme  # noqa: PLC0415
    from tools.demo_model.score import score_checkpoint  # noqa: PLC0415

    scores = score_checkpoint(directory, seed)
    write_readme(directory, scores)
    table = Table("task", "prompts", "right", "stopped")
    for one in scores:
        table.add_row(
            one.task,
            str(one.asked),
            f"{one.right / one.asked:.1%}",
            f"{one.stopped / one.asked:.1%}",
        )
    Console().print(table)


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
    )


if __name__ == "__main__":
    app()
