"""`rootstock pull`."""

from typing import Annotated

import typer

from engine.api import ModelError
from engine.launch import find_checkpoint
from server.terminal.commands.on_demand import command_app
from server.terminal.errors import TerminalError, errors_printed

app = command_app()


@app.command()
def pull(
    model: Annotated[str, typer.Argument(help="Such as mlx-community/Qwen3-4B-4bit.")],
) -> None:
    """Fetch a model into the Hugging Face cache, so that serve finds it there.

    Only what serve reads is fetched: weights, configuration and tokenizer, never code.
    """
    with errors_printed():
        try:
            typer.echo(find_checkpoint(model, download=True))
        except ModelError as error:
            raise TerminalError(str(error)) from error
