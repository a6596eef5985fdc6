"""`rootstock unload`."""

from typing import Annotated

import typer

from server.terminal.client.admin import administered
from server.terminal.commands.on_demand import command_app
from server.terminal.errors import errors_printed
from server.terminal.flags import settings_or_exit
from server.terminal.options import ApiKey, DaemonUrl
from server.terminal.running import endpoint_of

app = command_app()


@app.command()
def unload(
    model: Annotated[str, typer.Argument(help="As the daemon calls it; `rootstock ps` lists all.")],
    url: DaemonUrl = None,
    api_key: ApiKey = "",
) -> None:
    """Have the running daemon unload a model, and wait until its memory is free.

    What it has accepted ends before. The next request that names it loads it again.
    """
    with (
        errors_printed(),
        administered(endpoint_of(url, api_key, settings_or_exit({}))) as daemon,
    ):
        unloaded = daemon.unload(model)
    typer.echo(f"{unloaded.id} is {unloaded.state}")
