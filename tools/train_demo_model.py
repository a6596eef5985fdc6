"""Trains a demonstration model for Rootstock, and scores it.

python -m tools.train_demo_model train      from random weights; resumes if interrupted
python -m tools.train_demo_model refine     from the weights that ship; resumes if interrupted
python -m tools.train_demo_model score      on the held-out prompts, through the daemon's engine
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # two threads train
os.environ.setdefault("MKL_THREADING_LAYER", "SEQUENTIAL")

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from engine.mlx_backend.blas import load_blas

if TYPE_CHECKING:
    from tools.demo_model.course import Course

TRAINED = Path("build/demo-model")
SHIPPED = Path("engine/demo_model")
_SAVE_EVERY = 25

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
Directory = Annotated[Path, typer.Option(help="The checkpoint directory.")]
State = Annotated[Path, typer.Option(help="The file from which an interrupted run resumes.")]
Steps = Annotated[int, typer.Option(min=200)]


@app.command()
def train(
    directory: Directory = TRAINED,
    state: State = Path("build/demo-model-state.safetensors"),
    steps: Steps = 5000,
    seed: int = 0,
) -> None:
    """Train from random weights, or resume; then write the checkpoint and its scores."""
    load_blas()
    from tools.demo_model.course import from_nothing  # noqa: PLC0415 - MLX comes after the BLAS

    _follow(from_nothing(steps, seed), state, directory)


@app.command()
def refine(
    source: Annotated[
        Path, typer.Option("--from", help="The checkpoint to train further.")
    ] = SHIPPED,
    directory: Directory = TRAINED,
    state: State = Path("build/demo-model-refined-state.safetensors"),
    steps: Steps = 2220,
    seed: int = 0,
) -> None:
    """Train a checkpoint further on the present facts and tasks, or resume; then write the new
    checkpoint and its scores.
    """
    load_blas()
    from tools.demo_model.course import from_checkpoint  # noqa: PLC0415

    _follow(from_checkpoint(source, steps, seed), state, directory)


@app.command()
def score(directory: Directory = TRAINED, seed: int = 0) -> None:
    """Score a checkpoint on the held-out prompts, and write the scores into its README."""
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


def _follow(course: "Course", state: Path, directory: Path) -> None:
    """Train to the end of the course, and save the state now and then."""
    from tools.demo_model.publish import write_checkpoint  # noqa: PLC0415

    trainer = course.trainer
    state.parent.mkdir(parents=True, exist_ok=True)
    if state.exists():
        trainer.resume(state)
    with _progress() as progress:
        bar = progress.add_task(
            "training", total=course.steps, completed=trainer.step, loss=float("nan")
        )
        for halves in course.lessons():
            loss = trainer.learn(halves)
            progress.update(bar, completed=trainer.step, loss=loss)
            if trainer.step % _SAVE_EVERY == 0:
                trainer.save(state)
    write_checkpoint(directory, trainer.model, course.tokenizer)
    score(directory, course.seed)


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
