"""The daemon that runs already where the settings say that one listens."""

import ipaddress
from contextlib import suppress

import httpx

from server.chat.client import Endpoint, served_models
from server.chat.events import ChatError, KeyRefused
from server.settings import Settings, base_url, is_loopback


def running_daemon(settings: Settings, model: str | None) -> Endpoint | None:
    """The daemon at the configured port of this machine, if it answers and serves the model.

    Raises KeyRefused when it asks for another key than the settings have.
    """
    host = _reachable(settings.host)
    if settings.port == 0 or not is_loopback(host):
        return None  # its key is for this machine alone
    endpoint = Endpoint(base_url(host, settings.port), _key(settings))
    try:
        served = served_models(endpoint)
    except KeyRefused:
        raise
    except ChatError:
        return None
    return endpoint if model is None or model in served else None


def endpoint_at(url: str, api_key: str, settings: Settings) -> Endpoint:
    """The URL with the key that was given for it, else on this machine with the daemon's own."""
    with suppress(httpx.InvalidURL):  # the client says what is wrong
        if not api_key and is_loopback(httpx.URL(url).host):
            return Endpoint(url, _key(settings))
    return Endpoint(url, api_key)


def _reachable(host: str) -> str:
    """Where one asks a daemon that listens at the host: all addresses include the loopback."""
    with suppress(ValueError):
        address = ipaddress.ip_address(host.strip("[]"))
        if address.is_unspecified:
            return "127.0.0.1" if address.version == 4 else "::1"
    return host


def _key(settings: Settings) -> str:
    return settings.api_key.get_secret_value() if settings.api_key else ""
