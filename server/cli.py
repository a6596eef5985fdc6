"""`rootstock serve`, `rootstock doctor` and `rootstock chat`."""

import logging
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from engine.api import Engine
from engine.launch import describe_machine, launch
from server.app import create_app
from server.chat.client import Endpoint
from server.chat.run import chat as run_chat
from server.doctor import machine_table
from server.lifecycle import DrainingServer, bind
from server.log import configure_logging
from server.metrics import EngineTelemetry
from server.settings import ENVIRONMENT_PREFIX, Settings, SettingsError, load_settings

USAGE_ERROR = 2

log = logging.getLogger("rootstock")

app = typer.Typer(
    help="Serve language models with MLX behind the OpenAI API.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

ModelFlag = Annotated[
    str | None, typer.Option("--model", metavar="DIR_OR_REPO", help="What to serve.")
]
ConfigFlag = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="YAML with the same settings.")
]
CacheFlag = Annotated[
    str | None,
    typer.Option("--kv-cache-bytes", metavar="BYTES", help="The arena's size, such as 4GiB."),
]
StateCacheFlag = Annotated[
    str | None,
    typer.Option(
        "--state-cache-bytes", metavar="BYTES", help="For saved states of recurrent layers."
    ),
]
BlockSizeFlag = Annotated[
    int | None, typer.Option("--block-size", help="Tokens in one block of the KV cache.")
]


@app.callback()
def rootstock() -> None:
    """Every flag of serve and doctor can be set as ROOTSTOCK_NAME and in the YAML file, too; a
    flag wins.
    """


@app.command()
def serve(
    context: typer.Context,
    model: ModelFlag = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="The model's name in the API.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="0 takes a free one.")] = None,
    kv_cache_bytes: CacheFlag = None,
    state_cache_bytes: StateCacheFlag = None,
    block_size: BlockSizeFlag = None,
    max_running: Annotated[int | None, typer.Option(help="Sequences computed in one step.")] = None,
    max_waiting: Annotated[
        int | None, typer.Option(help="Sequences that may queue before requests are refused.")
    ] = None,
    step_tokens: Annotated[int | None, typer.Option(help="Tokens computed in one step.")] = None,
    prefix_cache: Annotated[
        bool | None, typer.Option("--prefix-cache/--no-prefix-cache", help="Share prefixes.")
    ] = None,
    attention: Annotated[str | None, typer.Option(help="auto, gather or cascade.")] = None,
    api_key: Annotated[
        str | None,
        typer.Option(help="Ask for this key. ROOTSTOCK_API_KEY keeps it out of the process list."),
    ] = None,
    allow_public_without_key: Annotated[
        bool | None,
        typer.Option("--allow-public-without-key", help="Serve other machines with no API key."),
    ] = None,
    config: ConfigFlag = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
) -> None:
    """Load a model, then serve it until SIGINT or SIGTERM."""
    settings = _settings(context)
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
def doctor(
    context: typer.Context,
    model: ModelFlag = None,
    kv_cache_bytes: CacheFlag = None,
    state_cache_bytes: StateCacheFlag = None,
    block_size: BlockSizeFlag = None,
    config: ConfigFlag = None,
) -> None:
    """Print what the machine offers, and what the KV budget comes to in tokens."""
    report = describe_machine(_settings(context).engine_config())
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
        str, typer.Option(envvar=f"{ENVIRONMENT_PREFIX}API_KEY", help="What the URL asks for.")
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
    """Talk to a model: at a URL, or on a daemon that runs as long as the chat."""
    parameters = {
        "temperature": temperature,
        "max_tokens": max_tokens,
        "top_p": top_p,
        "seed": seed,
    }
    given = {name: value for name, value in parameters.items() if value is not None}
    endpoint = None if url is None else Endpoint(url, api_key)
    if not run_chat(endpoint, model, system, given):
        raise typer.Exit(1)


def _settings(context: typer.Context) -> Settings:
    """Settings from the flags that were given, or one readable line for each that is wrong."""
    flags = {name: value for name, value in context.params.items() if value is not None}
    try:
        return load_settings(flags)
    except SettingsError as error:
        for line in str(error).splitlines():
            typer.echo(f"error: {line}", err=True)
        raise typer.Exit(USAGE_ERROR) from None


def _launch(settings: Settings, telemetry: EngineTelemetry) -> Engine:
    """The engine with its model loaded, or a line that says why not."""
    try:
        return launch(settings.engine_config(), telemetry, log.info)
    except Exception as error:
        log.error("cannot load %s: %s", settings.model or "the default model", error)
        log.debug("the whole story", exc_info=True)
        raise typer.Exit(1) from None
