"""Names of hosts and origins of web pages in settings. Imports nothing of the server."""

import ipaddress
import re

LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
NAME = re.compile(rf"{LABEL}(?:\.{LABEL})*")
BELOW = "*."

ANY_ORIGIN = "*"
APP_SCHEMES = "app|file|tauri|vscode-webview|vscode-file"
"""Of desktop programs' own pages, as Ollama allows them: no web site can have such an origin."""

ORIGIN = re.compile(rf"\*|(?:{APP_SCHEMES})://\*|[a-z][a-z0-9+.-]*://[a-z0-9_.:\[\]-]+")


def is_host_name(text: str) -> bool:
    """Whether `text` may stand in the setting `allowed_host`: a name, an address, or `*.` and a
    name; without a port.
    """
    name = text.lower()
    if NAME.fullmatch(name.removeprefix(BELOW)):
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def is_origin(text: str) -> bool:
    """Whether `text` may stand in the setting `cors_origin`."""
    return ORIGIN.fullmatch(text) is not None
