"""`rootstock top`."""

from server.terminal.client.admin import administered
from server.terminal.commands.on_demand import command_app
from server.terminal.errors import errors_printed
from server.terminal.flags import settings_or_exit
from server.terminal.loaded import loaded_model
from server.terminal.options import ApiKey, DaemonUrl, LoadedModelName
from server.terminal.running import endpoint_of
from server.terminal.top.run import top as show_top

app = command_app()


@app.command()
def top(model: LoadedModelName = None, url: DaemonUrl = None, api_key: ApiKey = "") -> None:
    """Watch a model's cache and what runs: prefixes stored once, who holds them, requests.

    Ctrl-C leaves. Without a terminal it is shown once.
    """
    with errors_printed():
        endpoint = endpoint_of(url, api_key, settings_or_exit({}))
        with administered(endpoint) as daemon:
            show_top(daemon, endpoint.base_url, loaded_model(daemon, model))
