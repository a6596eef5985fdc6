"""Which server a command talks to: the options that name it, and the daemon of the settings."""

import ipaddress
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Annotated

import typer

from server.http.listening import base_url, is_loopback
from server.settings import CLIENT_KEY_VARIABLE, Settings, variable_of
from server.terminal.admin_client import Admin, admin_client
from server.terminal.client import Endpoint, parse_url, served_models
from server.terminal.console import KeyRefused, TerminalError, Unreachable, errors_printed
from server.terminal.flags import settings_or_exit

MODEL = "One of several models, as `rootstock ps` lists them."
KEY = (
    "What the server asks for. The daemon's own address gets the key of the settings, such as "
    "ROOTSTOCK_API_KEY, if they have one and no other is given with the URL."
)

DaemonUrl = Annotated[
    str | None,
    typer.Option(
        "--url",
        help="A daemon, such as http://127.0.0.1:8000/v1. Without it the one that runs.",
    ),
]
ModelName = Annotated[str | None, typer.Option("--model", help=f"{MODEL} Default: the first.")]
LoadedModelName = Annotated[
    str | None, typer.Option("--model", help=f"{MODEL} Default: the first that is loaded.")
]
EachModelName = Annotated[
    str | None, typer.Option("--model", help=f"{MODEL} Default: each that is loaded.")
]
ApiKey = Annotated[str, typer.Option(envvar=CLIENT_KEY_VARIABLE, help=KEY)]

_DEFAULT_PORTS = {"http": 80, "https": 443}


@contextmanager
def daemon_at(url: str | None, api_key: str) -> Iterator[tuple[Admin, Endpoint]]:
    """A client of the daemon at the URL, or of the one that runs, and where that is.

    A TerminalError within the block is printed and ends the command with status 1.
    """
    with errors_printed():
        endpoint = endpoint_of(url, api_key, settings_or_exit({}))
        with admin_client(endpoint) as daemon:
            yield daemon, endpoint


def endpoint_of(url: str | None, api_key: str, settings: Settings) -> Endpoint:
    """The server at the URL, or the running daemon. Raises TerminalError when none runs."""
    if url is not None:
        return endpoint_at(url, api_key, settings)
    endpoint = _own(settings, api_key)
    if endpoint is None:
        raise TerminalError(
            f"the settings do not say where a daemon of this machine listens (host "
            f"{settings.host}, port {settings.port}); name one with --url"
        )
    try:
        served_models(endpoint)
    except Unreachable:
        raise Unreachable(
            f"no daemon runs at {endpoint.base_url}; `rootstock serve` starts one, "
            f"{variable_of('port')}=PORT or --url names one elsewhere"
        ) from None
    return endpoint


def endpoint_at(url: str, api_key: str, settings: Settings) -> Endpoint:
    """The server at the URL, with the key that was given for it. The settings' key is sent to the
    daemon's own address alone: another server may listen on another port of this machine.
    """
    own = _own(settings, "")
    if not api_key and own is not None and _origin(url) == _origin(own.base_url):
        return Endpoint(url, own.api_key)
    return Endpoint(url, api_key)


def running_daemon(settings: Settings, model: str | None, api_key: str = "") -> Endpoint | None:
    """The daemon at the configured port of this machine, if it answers and serves the model.

    `api_key` is used where the settings have none. Raises KeyRefused when the key is wrong.
    """
    endpoint = _own(settings, api_key)
    if endpoint is None:
        return None
    try:
        served = [served.name for served in served_models(endpoint)]
    except KeyRefused:
        raise
    except TerminalError:
        return None
    return endpoint if model is None or model in served else None


def _own(settings: Settings, api_key: str) -> Endpoint | None:
    """The daemon of the settings, with the settings' key or else the one given: a key file has only
    digests. None where the address may be another machine's, or the port is not known.
    """
    host = _reachable(settings.host)
    if settings.port == 0 or not is_loopback(host):
        return None
    key = settings.api_key.get_secret_value() if settings.api_key else api_key
    return Endpoint(base_url(host, settings.port), key)


def _reachable(host: str) -> str:
    """The host to connect to for a daemon that listens at the host: the loopback for a wildcard."""
    with suppress(ValueError):
        address = ipaddress.ip_address(host.strip("[]"))
        if address.is_unspecified:
            return "127.0.0.1" if address.version == 4 else "::1"
    return host


def _origin(url: str) -> tuple[str, str, int | None] | None:
    """Scheme, host and port. None for an invalid URL, which connecting reports."""
    with suppress(TerminalError):
        parts = parse_url(url)
        return parts.scheme, parts.host, parts.port or _DEFAULT_PORTS[parts.scheme]
    return None
