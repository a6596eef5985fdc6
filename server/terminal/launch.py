"""`rootstock launch`: starts a coding agent on a server, or prints the shell commands for it."""

import hashlib
import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from pydantic import BaseModel, ValidationError

from server.settings.folders import state_folder
from server.terminal.agents import AGENTS, Agent, Setup, Target
from server.terminal.cli import command
from server.terminal.client import (
    BRIEF,
    Endpoint,
    fetch,
    http_client,
    parse_url,
    served_models,
)
from server.terminal.console import TerminalError, errors_printed
from server.terminal.endpoint import ApiKey, DaemonUrl, endpoint_of
from server.terminal.flags import settings_or_exit

NO_KEY = "none"  # agents ask for a key even where the server does not


def _agent(name: str) -> Agent:
    if name not in AGENTS:
        raise typer.BadParameter(f"{name} is none of {', '.join(AGENTS)}")
    return AGENTS[name]


@command
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
        list[str] | None, typer.Argument(help="Arguments of the agent, after `--`.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A model that the server lists. Default: its first one.")
    ] = None,
    url: DaemonUrl = None,
    api_key: ApiKey = "",
    print_only: Annotated[
        bool,
        typer.Option(
            "--print", help="Print the shell commands that do the same, and start nothing."
        ),
    ] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Start even if the model's context is too short, or it can call no tools.",
        ),
    ] = False,
) -> None:
    """Start a coding agent on the running daemon.

    The agent gets the server and the model by variables and arguments of this one process. Its own
    files are not changed.
    """
    with errors_printed():
        endpoint = endpoint_of(url, api_key, settings_or_exit({}), model)
        target = _target(endpoint, model)
        if not force:
            _check_room(agent, target)
            _check_tools(agent, target, endpoint)
        setup = _setup(agent, target)
        if not print_only:
            _become(agent, setup, arguments or [])
    typer.echo(_script(agent, setup, arguments or []))


def _target(endpoint: Endpoint, model: str | None) -> Target:
    served = {listed.name: listed for listed in served_models(endpoint)}
    if model is not None and model not in served:
        raise TerminalError(f"{model} is not served there, but {', '.join(served)}")
    chosen = served[model or next(iter(served))]
    if not chosen.name.isprintable():
        raise TerminalError("the model's name has control characters")
    base_url = str(parse_url(endpoint.base_url)).rstrip("/")
    key = endpoint.api_key or NO_KEY
    folder = _folder(base_url, chosen.name)
    return Target(base_url, chosen.name, key, chosen.context_tokens, folder)


def _folder(base_url: str, model: str) -> Path:
    """The folder of this server and model: agents on different ones do not share files."""
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


def _setup(agent: Agent, target: Target) -> Setup:
    setup, program = agent.setup(target), shutil.which(agent.command)
    if agent.adapt is None or program is None:
        return setup
    return agent.adapt(program, target, setup)


class _ModelDescription(BaseModel):
    """A model in Ollama's API. The template is empty where the server does not know the model's."""

    template: str = ""
    capabilities: list[str] = []


def _check_tools(agent: Agent, target: Target, endpoint: Endpoint) -> None:
    """Raise TerminalError where the server reports that the model calls no tools.

    Servers report it in Ollama's API. A server without it is not checked.
    """
    if not agent.calls_tools:
        return
    try:
        with http_client(endpoint, BRIEF) as http:
            body = fetch(http, "POST", f"{target.root_url}/api/show", {"model": target.model})
        described = _ModelDescription.model_validate_json(body)
    except (TerminalError, ValidationError):
        return
    if described.template and "tools" not in described.capabilities:
        raise TerminalError(
            f"{agent.command} works through tools, and {target.model} can call none. Serve another "
            "model (`rootstock serve --model`), or try it with --force"
        )


def _become(agent: Agent, setup: Setup, arguments: Sequence[str]) -> None:
    """Replace this process by the agent, which then has the terminal to itself. It does not return.

    Raises TerminalError when the agent is not installed, or its files cannot be written.
    """
    path = shutil.which(agent.command)
    if path is None:
        raise TerminalError(f"there is no {agent.command} on the PATH; {agent.origin}")
    _write(setup.files)
    os.execve(path, _command(agent, setup, arguments), _environment(setup))


def _script(agent: Agent, setup: Setup, arguments: Sequence[str]) -> str:
    """Lines for a POSIX shell that start the agent: files to write, variables, and the command."""
    files = [
        f"(umask 077; mkdir -p {shlex.quote(str(path.parent))} && "
        f"printf %s {shlex.quote(text)} > {shlex.quote(str(path))})"
        for path, text in setup.files.items()
    ]
    variables = [
        f"unset {name}" if value is None else f"export {name}={shlex.quote(value)}"
        for name, value in setup.variables.items()
    ]
    return "\n".join([*files, *variables, shlex.join(_command(agent, setup, arguments))])


def _command(agent: Agent, setup: Setup, arguments: Sequence[str]) -> list[str]:
    own = arguments or agent.usual_arguments
    return [agent.command, *setup.arguments, *own]


def _write(files: Mapping[Path, str]) -> None:
    """Write the files, readable for their owner alone: they contain keys."""
    try:
        for path, text in files.items():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.touch(mode=0o600)
            path.write_text(text)
    except OSError as error:
        raise TerminalError(f"{error.filename}: {error.strerror}") from error


def _environment(setup: Setup) -> dict[str, str]:
    variables = {**os.environ, **setup.variables}
    return {name: value for name, value in variables.items() if value is not None}
