"""`rootstock chat`."""

from typing import Annotated

import typer

from server.terminal.chat.run import chat as run_chat
from server.terminal.commands.on_demand import command_app
from server.terminal.flags import settings_or_exit
from server.terminal.options import ApiKey, Url
from server.terminal.running import endpoint_at

app = command_app()


@app.command()
def chat(
    url: Url = None,
    api_key: ApiKey = "",
    model: Annotated[
        str | None,
        typer.Option(
            help="As the daemon that runs, or the server at --url, lists it; without it the first. "
            "Where no daemon runs that has it: what the chat's own serves."
        ),
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
    if not run_chat(endpoint, api_key, settings, model, system, given):
        raise typer.Exit(1)
