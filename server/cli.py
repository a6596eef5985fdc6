"""`rootstock serve`, `rootstock doctor` and `rootstock chat`."""

import logging
from dataclasses import fields
from typing import Annotated

import typer
from rich.console import Console

from engine.api import Engine
from engine.launch import describe_machine, launch
from engine.types import EngineConfig
from server import __version__
from server.app import create_app
from server.chat.run import chat as run_chat
from server.chat.running import endpoint_at
from server.doctor import machine_table
from server.flags import settings_or_exit, with_settings
from server.lifecycle import DrainingServer, bind
from server.log import configure_logging
from server.metrics import EngineTelemetry
from server.settings import CHAT_KEY_VARIABLE, Settings

log = logging.getLogger("rootstock")

app = typer.Typer(
    help="Serve language models with MLX behind the OpenAI API.",
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
        application = create_app(engine, settings, telemetry)
        DrainingServer(application, engine, settings).run(sockets=[bound])


@app.command()
@with_settings({"config", *(field.name for field in fields(EngineConfig))})
def doctor(settings: Settings) -> None:
    """Print what the machine offers, and what the KV budget comes to in tokens."""
    report = describe_machine(settings.engine_config())
    Console().print(machine_table(report))
    if report.problem:
        raise typer.Exit(1)


@app.command()
def chat(
    url: Annotated[
        str | None,
        typer.Option(help="Any OpenAI-compatible server, such as http://127.0.0.1:8000/v1."),
    ] = None,
    api_key: Annotated[
        str,
        typer.Option(
            envvar=CHAT_KEY_VARIABLE,
            help="What the URL asks for. Without it a daemon on this machine gets the key of the "
            "settings, such as ROOTSTOCK_API_KEY.",
        ),
    ] = "",
    model: Annotated[
        str | None,
        typer.Option(help="With --url its name there, or else the first one; without, as serve."),
    ] = None,
    system: Annotated[str, typer.Option(help="The system prompt.")] = "",
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="The longest answer.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same again.")] = None,
) -> None:
    """Talk to a model: at a URL, on the daemon that runs, or on one for as long as the chat."""
    parameters = {
        "temperature": temperature,
        "max_tokens": max_tokens,
        "top_p": top_p,
        "seed": seed,
    }
    given = {name: value for name, value in parameters.items() if value is not None}
    settings = settings_or_exit({})
    endpoint = None if url is None else endpoint_at(url, api_key, settings)
    if not run_chat(endpoint, settings, model, system, given):
        raise typer.Exit(1)


def _launch(settings: Settings, telemetry: EngineTelemetry) -> Engine:
    """The engine with its model loaded, or a line that says why not."""
    try:
        return launch(settings.engine_config(), telemetry, log.info)
    except Exception as error:
        log.error("cannot load %s: %s", settings.model or "the default model", error)
        log.debug("the whole story", exc_info=True)
        raise typer.Exit(1) from None
