"""`rootstock rm`."""

from typing import Annotated

import typer

from server.model_cache import NotCached, cached_models, deletions
from server.terminal.commands.on_demand import command_app
from server.terminal.errors import TerminalError, errors_printed
from server.terminal.text import bytes_text

app = command_app()


def _names() -> list[str]:
    return [repo.repo_id for repo in cached_models()]


@app.command()
def rm(
    models: Annotated[
        list[str], typer.Argument(help="As `rootstock ls` has them.", autocompletion=_names)
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask first.")] = False,
) -> None:
    """Delete models from the Hugging Face cache, every revision of them."""
    with errors_printed():
        try:
            strategies = deletions(models)
        except NotCached as error:
            raise TerminalError(f"{error}; `rootstock ls` lists what is") from error
    size = bytes_text(sum(strategy.expected_freed_size for strategy in strategies))
    if not yes:
        typer.confirm(f"Delete {', '.join(models)} ({size})?", abort=True)
    for strategy in strategies:
        strategy.execute()
    typer.echo(f"{size} freed")
