"""`rootstock key`: makes an API key, and its entry for the file of keys."""

from typing import Annotated

import typer
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from server.access.keys import ApiKey, Role, digest_of, entry_text, new_secret
from server.terminal.cli import command
from server.validation import plain_message


@command
def key(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The key's name: letters, digits, . _ @ and -.")
    ],
    role: Annotated[
        Role, typer.Option(help="user may use the models, admin also the routes of /admin.")
    ] = Role.USER,
    concurrency: Annotated[int | None, typer.Option(help="Most concurrent requests.")] = None,
    requests_per_minute: Annotated[int | None, typer.Option(help="Most requests a minute.")] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(help="Most tokens of prompts and answers a minute.")
    ] = None,
) -> None:
    """Make an API key. It is shown on standard error, once; its entry for api_keys_file goes to
    standard output, as in `rootstock key alice >> keys.yaml`.
    """
    secret = new_secret()
    try:
        entry = ApiKey(
            name=name,
            sha256=digest_of(secret),
            role=role,
            concurrency=concurrency,
            requests_per_minute=requests_per_minute,
            tokens_per_minute=tokens_per_minute,
        )
    except ValidationError as error:
        raise _bad_parameter(error.errors(include_url=False)[0]) from None
    typer.echo(entry_text(entry), nl=False)
    typer.echo(f"The key of {name}, shown only now: {secret}", err=True)


def _bad_parameter(error: ErrorDetails) -> typer.BadParameter:
    field = str(error["loc"][0])
    hint = "NAME" if field == "name" else f"--{field.replace('_', '-')}"
    return typer.BadParameter(f"{plain_message(error)}, not {error['input']!r}", param_hint=hint)
