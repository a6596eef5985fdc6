"""Options that several commands have."""

from typing import Annotated

import typer

from server.settings import CLIENT_KEY_VARIABLE

URL = "Any OpenAI-compatible server, such as http://127.0.0.1:8000/v1."
DAEMON = "A daemon, such as http://127.0.0.1:8000/v1. Without it the one that runs."
MODEL = "One of several models, as `rootstock ps` lists them."
KEY = (
    "What the server asks for. The daemon's own address gets the key of the settings, such as "
    "ROOTSTOCK_API_KEY, if they have one and no other is given with the URL."
)

Url = Annotated[str | None, typer.Option(help=URL)]
DaemonUrl = Annotated[str | None, typer.Option("--url", help=DAEMON)]
ModelName = Annotated[str | None, typer.Option("--model", help=f"{MODEL} Default: the first.")]
LoadedModelName = Annotated[
    str | None, typer.Option("--model", help=f"{MODEL} Default: the first that is loaded.")
]
EachModelName = Annotated[
    str | None, typer.Option("--model", help=f"{MODEL} Default: each that is loaded.")
]
ApiKey = Annotated[str, typer.Option(envvar=CLIENT_KEY_VARIABLE, help=KEY)]
