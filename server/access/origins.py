"""Which web origins may send requests. Only browsers send an Origin header."""

import re
from collections.abc import Sequence

ANY_ORIGIN = "*"
APP_SCHEMES = "app|file|tauri|vscode-webview|vscode-file"
"""Of desktop programs' own pages, as Ollama allows them: no web site can have such an origin."""

ORIGIN = re.compile(rf"\*|(?:{APP_SCHEMES})://\*|[a-z][a-z0-9+.-]*://[a-z0-9_.:\[\]-]+")

_HOST = r"(?P<name>[^\s:/@?#\[\]]+|\[[0-9a-fA-F:.]+\])(?::(?P<port>[0-9]{1,5}))?"
_HOST_HEADER = re.compile(_HOST)
_WEB_ORIGIN = re.compile(rf"(?P<scheme>https?)://{_HOST}")
_DEFAULT_PORTS = {"http": 80, "https": 443}


class Origins:
    """Whose pages may ask: origins as browsers send them, `app://*` and the like, or `*`."""

    def __init__(self, allowed: Sequence[str]) -> None:
        patterns = [re.escape(origin).replace(r"\*", ".*") for origin in allowed]
        self.pattern = "|".join(patterns) or "(?!)"

    def has(self, origin: str) -> bool:
        return re.fullmatch(self.pattern, origin) is not None


def is_origin(text: str) -> bool:
    """Whether it can stand in Origins."""
    return ORIGIN.fullmatch(text) is not None


def is_own(origin: str, scheme: str, host: str) -> bool:
    """Whether an Origin header names this daemon, which was reached by `scheme` and the Host header
    `host`. Scheme, name and port must agree. `null` and origins of other schemes name none.

    Where the Host has no port an https page agrees with plain HTTP: a proxy in front of the daemon
    may end TLS without saying so.
    """
    page, own = _WEB_ORIGIN.fullmatch(origin), _HOST_HEADER.fullmatch(host)
    if page is None or own is None or page["name"].lower() != own["name"].lower():
        return False
    default = _DEFAULT_PORTS[page["scheme"]]
    if int(page["port"] or default) != int(own["port"] or default):
        return False
    return page["scheme"] == scheme or (page["scheme"] == "https" and own["port"] is None)
