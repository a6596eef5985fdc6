"""`rootstock serve`."""

import logging

import typer

from engine.api import Engine
from engine.disk_folder import TierError
from engine.launch import launch
from server.app import create_app
from server.lifecycle import DrainingServer, bind, spare_full_collections
from server.log import configure_logging
from server.metrics.metrics import EngineTelemetry
from server.settings import Settings
from server.terminal.commands.on_demand import command_app
from server.terminal.flags import with_settings
from server.terminal.launch.agents import AGENTS

log = logging.getLogger("rootstock")

app = command_app()


@app.command()
@with_settings()
def serve(settings: Settings) -> None:
    """Load a model, then serve it until SIGINT or SIGTERM."""
    configure_logging(settings.log_level)
    try:
        bound = bind(settings)
    except OSError as error:
        log.error("cannot listen on %s, port %d: %s", settings.host, settings.port, error.strerror)
        raise typer.Exit(1) from None
    with bound:
        telemetry = EngineTelemetry()
        engine = _launch(settings, telemetry)
        application = create_app(engine, settings, telemetry, tuple(AGENTS))
        server = DrainingServer(application, engine, settings)
        spare_full_collections()
        server.run(sockets=[bound])


def _launch(settings: Settings, telemetry: EngineTelemetry) -> Engine:
    """The engine with its model loaded, or a line that says why not."""
    try:
        return launch(settings.engine_config(), telemetry, log.info)
    except TierError as error:  # names the directory, and has nothing to do with the model
        log.error("%s", error)
        raise typer.Exit(1) from None
    except Exception as error:
        log.error("cannot load %s: %s", settings.model or "the default model", error)
        log.debug("the whole story", exc_info=True)
        raise typer.Exit(1) from None
