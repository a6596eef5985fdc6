"""The models that a server lists."""

import httpx

from server.terminal.client.http import BRIEF, Endpoint, ask, connection
from server.terminal.client.wire import ServedModel, listed_models


def served_models(endpoint: Endpoint) -> list[ServedModel]:
    """One or more. Raises TerminalError, also when the server does not answer soon."""
    with connection(endpoint, BRIEF) as http:
        return models_of(http)


def models_of(http: httpx.Client) -> list[ServedModel]:
    """One or more. Raises TerminalError."""
    return listed_models(ask(http, "GET", "models"))
