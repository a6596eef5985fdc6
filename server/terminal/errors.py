"""What goes wrong at the terminal, and how the user is told."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from server.terminal.text import printable


class TerminalError(Exception):
    """What the user asked for cannot be done. The text says why, in a line for the user."""


class Unreachable(TerminalError):
    """Nobody answers at the address."""


class KeyRefused(TerminalError):
    """The server answers, but asks for another API key."""


class NotThere(TerminalError):
    """The server answers, but has nothing there."""


@contextmanager
def errors_told() -> Iterator[None]:
    """A TerminalError becomes a line on standard error and the exit status 1."""
    try:
        yield
    except TerminalError as error:
        typer.echo(f"error: {printable(str(error))}", err=True)
        raise typer.Exit(1) from None
