"""Commands whose modules are imported when they are called: `ls` does not wait for the server's
imports, and `--help` and `--version` for none.
"""

from collections import UserDict
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

SUMMARIES = {
    "serve": "Load models, then serve them until SIGINT or SIGTERM.",
    "chat": "Talk to a model: the daemon's that runs, or any server's.",
    "launch": "Start a coding agent on the daemon that runs.",
    "ps": "Show what runs: the daemon, its models, requests.",
    "load": "Have the running daemon load a model.",
    "unload": "Have the running daemon unload a model.",
    "top": "Watch the cache and what runs.",
    "cache": "Look into the KV cache of the daemon, or a disk cache.",
    "pull": "Fetch a model into the Hugging Face cache.",
    "ls": "List the models in the Hugging Face cache.",
    "rm": "Delete models from the Hugging Face cache.",
    "doctor": "Print what the machine offers, or measure it.",
    "key": "Make an API key.",
}
"""In the order in which help shows them."""


class CommandsOnDemand(TyperGroup):
    """Help is made of SUMMARIES; a command that is looked up is imported."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = _Imported({name: f"{__package__}.{name}" for name in SUMMARIES})

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(SUMMARIES.items()))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Of the options that are carried out here --install-completion alone writes files."""
        try:
            return super().parse_args(ctx, args)
        except OSError as error:
            if error.filename is None:  # it is the output that is closed, or full
                raise
            typer.echo(
                f"error: cannot write {error.filename}: {error.strerror}; "
                f"`{ctx.info_name} --show-completion` prints what a shell has to read",
                err=True,
            )
            raise typer.Exit(1) from None


class _Imported(UserDict[str, Any]):
    """Commands by name, imported at look-up."""

    def __getitem__(self, name: str) -> Any:
        return typer.main.get_command(import_module(super().__getitem__(name)).app)


def command_app() -> typer.Typer:
    """The Typer that a command's module adds its commands to."""
    return typer.Typer(add_completion=False, no_args_is_help=False, rich_markup_mode=None)
