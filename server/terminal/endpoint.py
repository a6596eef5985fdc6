"""Finds the server for a command: by options, or among the daemons of this machine."""

import ipaddress
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Annotated

import typer

from server.http.listening import base_url, is_loopback
from server.settings import CLIENT_KEY_VARIABLE, Settings, variable_of
from server.terminal.admin_client import Admin, admin_client
from server.terminal.client import Endpoint, parse_url, served_models
from server.terminal.console import KeyRefused, Starting, TerminalError, errors_printed
from server.terminal.flags import settings_or_exit
from server.terminal.records import Record, running_records

MODEL = "A name of the model, see `rootstock ps`."

DaemonUrl = Annotated[
    str | None,
    typer.Option(
        "--url",
        help="The daemon, such as http://127.0.0.1:8000/v1. Default: the running one.",
    ),
]
ModelName = Annotated[str | None, typer.Option("--model", help=f"{MODEL} Default: the first.")]
LoadedModelName = Annotated[
    str | None, typer.Option("--model", help=f"{MODEL} Default: the first that is loaded.")
]
EachModelName = Annotated[
    str | None, typer.Option("--model", help=f"{MODEL} Default: each that is loaded.")
]
ApiKey = Annotated[
    str,
    typer.Option(
        envvar=CLIENT_KEY_VARIABLE,
        help="API key to send. Default for a daemon of yours on this machine: "
        f"{variable_of('api_key')}.",
    ),
]

_DEFAULT_PORTS = {"http": 80, "https": 443}


@contextmanager
def daemon_at(
    url: str | None, api_key: str, model: str | None = None
) -> Iterator[tuple[Admin, Endpoint]]:
    """A client of the daemon at the URL, or of the running one, and where that is. Of several that
    run it is the one that serves the model.

    A TerminalError within the block is printed and ends the command with status 1.
    """
    with errors_printed():
        endpoint = endpoint_of(url, api_key, settings_or_exit({}), model)
        with admin_client(endpoint) as daemon:
            yield daemon, endpoint


def endpoint_of(
    url: str | None, api_key: str, settings: Settings, model: str | None = None
) -> Endpoint:
    """The server at the URL, or the running daemon: see `running_daemon`.

    Raises TerminalError when no daemon runs, with the addresses that were tried.
    """
    if url is not None:
        return endpoint_at(url, api_key, settings)
    found = running_daemon(settings, model, api_key)
    if found is None and model is not None:
        found = running_daemon(settings, None, api_key)  # which can say that it has no such model
    if found is None:
        raise TerminalError(_none_text(settings))
    return found


def endpoint_at(url: str, api_key: str, settings: Settings) -> Endpoint:
    """The server at the URL, with the key that was given for it. The settings' key is sent to this
    user's own daemons alone: another program may listen on another port of this machine.
    """
    own = _own(settings)
    ours = [own, *(record.url for record in running_records())]
    is_ours = _origin(url) is not None and _origin(url) in map(_origin, filter(None, ours))
    return Endpoint(url, api_key or (_key(settings, "") if is_ours else ""))


def running_daemon(settings: Settings, model: str | None, api_key: str = "") -> Endpoint | None:
    """The daemon at the address of the settings if it answers, else the only one that runs at
    another; with a model, one that serves it. None where there is none.

    A port that flags, environment or YAML set is the only one that is tried. The key is that of the
    settings, or else `api_key`, because a file of keys has only digests. Raises KeyRefused when
    the key is wrong, Starting for a daemon that loads its models, and TerminalError where several
    daemons could be meant.
    """
    own, key = _own(settings), _key(settings, api_key)
    if own is not None:
        served = _served(endpoint := Endpoint(own, key))
        if served and (model is None or model in served):
            return endpoint
    others = [each for each in _others(settings) if model is None or model in each.models]
    if len(others) > 1:
        listed = "; ".join(each.text for each in others)
        raise TerminalError(f"several daemons run; choose one with --url: {listed}")
    return Endpoint(others[0].url, key) if others else None


def other_daemons(endpoint: Endpoint) -> list[Record]:
    """The daemons of this user that run here and are not the one at the endpoint."""
    here = _origin(endpoint.base_url)
    return [each for each in running_records() if _origin(each.url) != here]


def _others(settings: Settings) -> list[Record]:
    """The running daemons at other addresses than that of the settings, unless they set a port."""
    if _is_port_set(settings):
        return []
    return other_daemons(Endpoint(_own(settings) or ""))


def _is_port_set(settings: Settings) -> bool:
    return settings.port > 0 and "port" in settings.model_fields_set


def _none_text(settings: Settings) -> str:
    own, running = _own(settings), running_records()
    none = "no daemon runs" + (f" at {own}" if own else "")
    if running:
        return f"{none}; --url names one that does: {'; '.join(each.text for each in running)}"
    if own is None and settings.port:
        return (
            f"the settings do not say where a daemon of this machine listens (host "
            f"{settings.host}, port {settings.port}); name one with --url"
        )
    elsewhere = ", nor another of yours" if own and not _is_port_set(settings) else ""
    return f"{none}{elsewhere}; `rootstock serve` starts one, --url names one elsewhere"


def _served(endpoint: Endpoint) -> list[str]:
    """The names of the models that the daemon at the endpoint serves; none where no daemon answers.
    Raises KeyRefused and Starting.
    """
    try:
        return [served.name for served in served_models(endpoint)]
    except (KeyRefused, Starting):
        raise
    except TerminalError:
        return []


def _own(settings: Settings) -> str | None:
    """The URL of the daemon of the settings. None where the address may be another machine's, or
    the port is not known.
    """
    host = reachable(settings.host)
    if settings.port == 0 or not is_loopback(host):
        return None
    return base_url(host, settings.port)


def _key(settings: Settings, api_key: str) -> str:
    return settings.api_key.get_secret_value() if settings.api_key else api_key


def reachable(host: str) -> str:
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
