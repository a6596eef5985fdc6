"""`rootstock rank`: computes a part of the model of a daemon on another machine."""

import logging
import signal
from pathlib import Path
from typing import Annotated

import typer

from engine.api import ModelError
from engine.launch import join_ranks
from server.serve import configure_logging
from server.terminal.cli import command
from server.terminal.console import errors_printed, typeable

MAX_PORT = 65_535

log = logging.getLogger("rootstock")


def _address(text: str) -> tuple[str, int]:
    """The host and the port of an address."""
    host, _, port = text.rpartition(":")
    if not host or not (port.isdecimal() and 0 < int(port) <= MAX_PORT):
        raise typer.BadParameter(f"must be HOST:PORT, as 192.168.7.1:5700, not {text!r}")
    return host, int(port)


@command
def rank(
    *,
    model: Annotated[
        str,
        typer.Option(
            help="The daemon's model, as this machine has it: a directory, which may be another "
            "one here, or a Hugging Face repository."
        ),
    ],
    join: Annotated[str, typer.Option(metavar="HOST:PORT", help="The daemon's ranks_listen.")],
    key_file: Annotated[
        Path, typer.Option(help="A copy of the daemon's ranks_key_file, which only you may read.")
    ],
) -> None:
    """Compute a part of a model whose daemon runs on another machine, with `ranks` and
    `ranks_listen`, until Ctrl-C or SIGTERM.

    All settings are the daemon's. After a loss this joins again by itself. Prompts come
    unencrypted: use a private network.
    """
    address = _address(join)
    configure_logging("info", typeable)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with errors_printed(ModelError):
            join_ranks(model, address, key_file, log.info)
    except KeyboardInterrupt:
        log.info("stopped")
