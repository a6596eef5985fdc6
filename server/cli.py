"""The `rootstock` command. Its commands are in server/terminal/commands/."""

from typing import Annotated

import typer

from server import __version__
from server.terminal.commands.on_demand import CommandsOnDemand

app = typer.Typer(
    cls=CommandsOnDemand,
    help="Serve language models with MLX behind the APIs of OpenAI and Anthropic.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # tables cut the names of flags short
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"rootstock {__version__}")
        raise typer.Exit


@app.callback()
def rootstock(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Say which it is."),
    ] = False,
) -> None:
    """Every flag of serve and doctor can be set as ROOTSTOCK_NAME and in the YAML file, too; a
    flag wins.
    """
