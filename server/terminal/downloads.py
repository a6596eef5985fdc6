"""`rootstock pull`, `ls` and `rm`: the models in the Hugging Face cache."""

from typing import Annotated

import typer
from huggingface_hub import constants

from server.models.hub import NotCached, cached_models, deletions
from server.terminal.cli import command
from server.terminal.console import (
    TerminalError,
    bytes_text,
    errors_printed,
    listing,
    printable,
    show,
    typeable,
)


@command
def pull(
    model: Annotated[
        str, typer.Argument(help="Such as mlx-community/Qwen3-4B-4bit, smollm2 or minilm.")
    ],
) -> None:
    """Fetch a model into the Hugging Face cache, so that serve finds it there; smollm2 and minilm
    into the user's cache folder.

    Only weights, configuration and tokenizer are fetched, never code.
    """
    # Imported here because `ls` and `rm` would wait for it.
    from engine.api import ModelError  # noqa: PLC0415
    from engine.launch import find_checkpoint  # noqa: PLC0415

    with errors_printed():
        try:
            typer.echo(find_checkpoint(model, download=True))
        except ModelError as error:
            raise TerminalError(f"cannot fetch {model}: {error}") from error


@command
def ls() -> None:
    """List the models in the Hugging Face cache, the most recently used first."""
    rows = [
        (repo.repo_id, bytes_text(repo.size_on_disk), repo.last_accessed_str)
        for repo in cached_models()
    ]
    if rows:
        show(listing(("model", "size", "last used"), rows))
    else:
        nothing = f"no models in {constants.HF_HUB_CACHE}; `rootstock pull` fetches one"
        typer.echo(typeable(printable(nothing)), err=True)


def _names() -> list[str]:
    return [repo.repo_id for repo in cached_models()]


@command
def rm(
    models: Annotated[
        list[str], typer.Argument(help="Names from `rootstock ls`.", autocompletion=_names)
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking.")] = False,
) -> None:
    """Delete models from the Hugging Face cache, with all their revisions."""
    with errors_printed():
        try:
            strategies = deletions(models)
        except NotCached as error:
            raise TerminalError(f"{error}; `rootstock ls` lists the models") from error
    size = bytes_text(sum(strategy.expected_freed_size for strategy in strategies))
    if not yes:
        typer.confirm(f"Delete {', '.join(models)} ({size})?", abort=True)
    for strategy in strategies:
        strategy.execute()
    typer.echo(f"{size} freed")
