"""`rootstock bench`."""

import random
import secrets
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console

from server.terminal.bench import Measured, loads, play
from server.terminal.client.chat import connected
from server.terminal.client.models import models_of
from server.terminal.client.wire import ServedModel
from server.terminal.commands.on_demand import command_app
from server.terminal.errors import errors_printed
from server.terminal.flags import settings_or_exit
from server.terminal.options import URL, ApiKey
from server.terminal.running import endpoint_of
from server.terminal.tables import listing, show

HEADS = ("load", "prompt", "cached", "first token", "tokens/s", "in all")

PROMPT_WORDS = 1500
WORD_TOKENS = 10
"""At the most, were each byte a token, and some room for the answer."""

app = command_app()


@app.command()
def bench(
    url: Annotated[
        str | None, typer.Argument(help=f"{URL} Without it the daemon that runs.")
    ] = None,
    api_key: ApiKey = "",
    model: Annotated[
        str | None, typer.Option(help="As the server lists it; without, its first one.")
    ] = None,
    prompt_words: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1_000_000,
            help=f"Length of the prompt that is shared. Default: {PROMPT_WORDS}, or fewer where "
            "the model's context is short.",
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="Length of an answer.")] = 64,
    seed: Annotated[
        int | None, typer.Option(help="The same prompts again, which a server may have cached.")
    ] = None,
) -> None:
    """Measure a server by 41 answers: to short prompts and long ones, 1 and 8 at a time.

    The long prompts begin alike: the first is cold, the others are warm. Figures are medians over
    a load's answers; "in all" is what they come to together, per second.
    """
    draw = random.Random(secrets.randbits(32) if seed is None else seed)
    parameters = {"max_tokens": max_tokens, "temperature": 0}
    notes, rows = Console(stderr=True), []
    with errors_printed():
        endpoint = endpoint_of(url, api_key, settings_or_exit({}))
        with connected(endpoint, model, parameters) as client:
            words = prompt_words or _fitting_words(models_of(client.http), client.model)
            for load in loads(words, draw):
                with notes.status(load.name):
                    rows.append(_row(play(load, client)))
            typer.echo(f"{client.model} at {client.base_url}", err=True)
    show(listing(HEADS, rows))


def _fitting_words(served: Sequence[ServedModel], model: str) -> int:
    context = next((listed.context_tokens for listed in served if listed.name == model), None)
    return PROMPT_WORDS if context is None else max(1, min(PROMPT_WORDS, context // WORD_TOKENS))


def _row(measured: Measured) -> tuple[str, ...]:
    return (
        measured.load.name,
        _figure(measured.prompt_tokens, ",.0f"),
        _figure(measured.cached_tokens, ",.0f"),
        _figure(measured.first_seconds, ".3f", " s"),
        _figure(measured.tokens_per_second, ",.1f"),
        _figure(measured.all_tokens_per_second, ",.1f"),
    )


def _figure(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"
