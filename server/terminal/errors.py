"""Errors of the command line, and how they are printed."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from server.terminal.text import printable


class TerminalError(Exception):
    """A command failed. The text says why, in one line for the user."""


class Unreachable(TerminalError):
    """No server answers at the address."""


class KeyRefused(TerminalError):
    """The server refuses the API key (401, 403)."""


class NotFound(TerminalError):
    """The server does not have the path (404)."""


class NotLoaded(TerminalError):
    """The daemon has the model, but not in memory."""


class UnknownModel(TerminalError):
    """The server has no model of that name (404)."""


@contextmanager
def errors_printed() -> Iterator[None]:
    """Print a TerminalError as a line on standard error, and exit with status 1."""
    try:
        yield
    except TerminalError as error:
        typer.echo(f"error: {printable(str(error))}", err=True)
        raise typer.Exit(1) from None
