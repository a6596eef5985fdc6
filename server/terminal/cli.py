"""The `rootstock` command: the list of its commands, each imported when it is called.

So `ls` does not wait for the server's imports, and `--help` and `--version` for none.
"""

from collections import UserDict
from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from server import __version__

WIDEST = 10_000
"""Columns of help: as many as the terminal has."""

SUMMARIES = {
    "serve": "Serve models until Ctrl-C or SIGTERM.",
    "rank": "Compute a part of the model of a daemon on another machine.",
    "chat": "Talk to a model of the running daemon, or of any server.",
    "launch": "Start a coding agent on the running daemon.",
    "ps": "Show the running daemon: models, memory, requests.",
    "load": "Load a model in the running daemon.",
    "unload": "Unload a model in the running daemon.",
    "top": "Watch a model's cache and requests.",
    "cache": "Show, clear or check the KV cache, in memory or on disk.",
    "pull": "Fetch a model into the Hugging Face cache.",
    "ls": "List the models in the Hugging Face cache.",
    "rm": "Delete models from the Hugging Face cache.",
    "doctor": "Show this machine and the memory plan of a model, or measure them.",
    "key": "Make an API key.",
}
"""The summary of each command in help, in order."""

SHARED_MODULES = {
    **dict.fromkeys(("ps", "load", "unload"), "daemon"),
    **dict.fromkeys(("pull", "ls", "rm"), "downloads"),
}
"""The modules of the commands that have none of their own name."""


def command(run: Callable[..., None], kind: type[TyperCommand] | None = None) -> typer.Typer:
    """Make a command of a function, of a class of its own where `kind` is one. The module's
    attribute of the command's name is the result.
    """
    app = command_group()
    app.command(cls=kind)(run)
    return app


def command_group() -> typer.Typer:
    """A Typer to add subcommands to."""
    return typer.Typer(add_completion=False, no_args_is_help=False, rich_markup_mode=None)


class CommandsOnDemand(TyperGroup):
    """A group that makes its help of SUMMARIES, and imports a command when it is looked up."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = _Imported(
            {name: f"{__package__}.{SHARED_MODULES.get(name, name)}" for name in SUMMARIES}
        )

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(SUMMARIES.items()))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. Of the options that are carried out here, --install-completion alone
        writes files; where it cannot, an error says what to do instead.
        """
        try:
            return super().parse_args(ctx, args)
        except OSError as error:
            if error.filename is None:  # the output is closed, or full
                raise
            typer.echo(
                f"error: cannot write {error.filename}: {error.strerror}; "
                f"`{ctx.info_name} --show-completion` prints the script for the shell",
                err=True,
            )
            raise typer.Exit(1) from None


class _Imported(UserDict[str, Any]):
    """Commands by name, imported at look-up from the modules that the values name."""

    def __getitem__(self, name: str) -> Any:
        return typer.main.get_command(getattr(import_module(super().__getitem__(name)), name))


app = typer.Typer(
    cls=CommandsOnDemand,
    help="Serve language models on MLX, with the APIs of OpenAI, Anthropic and Ollama.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # tables cut the names of flags short
    context_settings={"max_content_width": WIDEST},
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"rootstock {__version__}")
        raise typer.Exit


@app.callback()
def rootstock(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Every flag of serve and doctor can also be set as ROOTSTOCK_NAME or in a YAML file; a flag
    wins.
    """
