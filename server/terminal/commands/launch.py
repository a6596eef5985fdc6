"""`rootstock launch`."""

import hashlib
from pathlib import Path
from typing import Annotated

import typer

from server.terminal.client.http import Endpoint, parsed
from server.terminal.client.models import served_models
from server.terminal.commands.on_demand import command_app
from server.terminal.errors import TerminalError, errors_printed
from server.terminal.flags import settings_or_exit
from server.terminal.launch.agent import Agent, Target
from server.terminal.launch.agents import AGENTS
from server.terminal.launch.process import become, script
from server.terminal.options import ApiKey, DaemonUrl
from server.terminal.running import endpoint_of
from server.terminal.state import state_folder

NO_KEY = "none"  # agents ask for one, also where the server does not

app = command_app()


def _agent(name: str) -> Agent:
    if name not in AGENTS:
        raise typer.BadParameter(f"{name} is none of {', '.join(AGENTS)}")
    return AGENTS[name]


@app.command()
def launch(
    agent: Annotated[
        Agent,
        typer.Argument(
            parser=_agent,
            metavar="AGENT",
            help=f"{', '.join(AGENTS)}.",
            autocompletion=lambda: list(AGENTS),
        ),
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="For the agent, after `--`.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="As the server lists it; without, its first one.")
    ] = None,
    url: DaemonUrl = None,
    api_key: ApiKey = "",
    print_only: Annotated[
        bool, typer.Option("--print", help="Show it as lines for a shell, and start nothing.")
    ] = False,
    force: Annotated[
        bool, typer.Option(help="Also where the model's context is too short for the agent.")
    ] = False,
) -> None:
    """Start a coding agent on the daemon that runs.

    It gets its variables and arguments for this one time; its own files are left alone.
    """
    with errors_printed():
        target = _target(endpoint_of(url, api_key, settings_or_exit({})), model)
        if not force:
            _check_room(agent, target)
        setup = agent.setup(target)
        if not print_only:
            become(agent, setup, arguments or [])
    typer.echo(script(agent, setup, arguments or []))


def _target(endpoint: Endpoint, model: str | None) -> Target:
    served = {listed.name: listed for listed in served_models(endpoint)}
    if model is not None and model not in served:
        raise TerminalError(f"{model} is not served there, but {', '.join(served)}")
    chosen = served[model or next(iter(served))]
    if not chosen.name.isprintable():
        raise TerminalError("the model's name has control characters")
    base_url = str(parsed(endpoint.base_url)).rstrip("/")
    key = endpoint.api_key or NO_KEY
    folder = _folder(base_url, chosen.name)
    return Target(base_url, chosen.name, key, chosen.context_tokens, folder)


def _folder(base_url: str, model: str) -> Path:
    """One for each server and model, so that agents started on several keep out of each other's."""
    digest = hashlib.sha256(f"{base_url} {model}".encode()).hexdigest()
    return state_folder() / "launch" / digest[:12]


def _check_room(agent: Agent, target: Target) -> None:
    context = target.context_tokens
    if context is not None and context < agent.least_context_tokens:
        raise TerminalError(
            f"{agent.command} begins with about {agent.first_request_tokens:,} tokens and needs a "
            f"context of {agent.least_context_tokens:,}; {target.model} has {context:,}. Serve a "
            "model with more (`rootstock serve --model`), or try it with --force"
        )
