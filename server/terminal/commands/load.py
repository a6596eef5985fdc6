"""`rootstock load`."""

from typing import Annotated

import typer

from server.terminal.client.admin import administered
from server.terminal.commands.on_demand import command_app
from server.terminal.errors import errors_printed
from server.terminal.flags import settings_or_exit
from server.terminal.options import ApiKey, DaemonUrl
from server.terminal.running import endpoint_of
from server.terminal.text import bytes_text

app = command_app()


@app.command()
def load(
    model: Annotated[str, typer.Argument(help="As the daemon calls it; `rootstock ps` lists all.")],
    url: DaemonUrl = None,
    api_key: ApiKey = "",
) -> None:
    """Have the running daemon load a model, and wait until it is ready.

    Others make room as they would for a request.
    """
    with (
        errors_printed(),
        administered(endpoint_of(url, api_key, settings_or_exit({}))) as daemon,
    ):
        loaded = daemon.load(model)
    memory = f", {bytes_text(loaded.memory_bytes)}" if loaded.memory_bytes else ""
    typer.echo(f"{loaded.id} is {loaded.state}{memory}")
