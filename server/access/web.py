"""Protects a daemon without API keys from web pages: the allowed Host and Origin headers.

A page may post to localhost without asking; its browser then sends the page's origin. In DNS
rebinding the page's own name resolves to this machine, so that page and daemon are one site for the
browser; the Host header still has the page's name.
"""

import ipaddress
import re
from collections.abc import Sequence

PRIVATE_DOMAINS = "localhost|local|internal"
"""Never in the public DNS: RFC 6761, section 6.3; RFC 6762, section 3; ICANN, 29 July 2024."""

LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
NAME = re.compile(rf"{LABEL}(?:\.{LABEL})*")
PRIVATE_NAME = re.compile(rf"localhost|(?:{LABEL}\.)+(?:{PRIVATE_DOMAINS})")
HEADER = re.compile(r"(?:\[(?P<v6>[^\]]*)\]|(?P<name>[^:\[\]]*))(?::[0-9]{0,5})?")
BELOW = "*."

ANY_ORIGIN = "*"
APP_SCHEMES = "app|file|tauri|vscode-webview|vscode-file"
"""Of desktop programs' own pages, as Ollama allows them: no web site can have such an origin."""

ORIGIN = re.compile(rf"\*|(?:{APP_SCHEMES})://\*|[a-z][a-z0-9+.-]*://[a-z0-9_.:\[\]-]+")

_HOST = r"(?P<name>[^\s:/@?#\[\]]+|\[[0-9a-fA-F:.]+\])(?::(?P<port>[0-9]{1,5}))?"
_HOST_HEADER = re.compile(_HOST)
_WEB_ORIGIN = re.compile(rf"(?P<scheme>https?)://{_HOST}")
_DEFAULT_PORTS = {"http": 80, "https": 443}

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Hosts:
    """The names of this daemon, as Host headers have them, with or without a port.

    Loopback addresses and private names are always among them; so are `listening` (where that is
    the unspecified address, every address) and `allowed`, in which `*.example.org` is every name
    below example.org. An address is safe from rebinding: only a program on it can serve a page.
    """

    def __init__(self, listening: str, allowed: Sequence[str] = ()) -> None:
        names = [_shortest(name.lower().strip("[]")) for name in (listening, *allowed)]
        self._names = frozenset(name for name in names if name)
        self._domains = tuple(name.removeprefix("*") for name in names if name.startswith(BELOW))
        address = _address(names[0])
        self._has_every_address = address is not None and address.is_unspecified

    def has(self, header: str) -> bool:
        """Whether a Host header names this daemon."""
        parts = HEADER.fullmatch(header.lower())
        if parts is None:
            return False
        host = _shortest(parts["name"] if parts["v6"] is None else parts["v6"])
        if host in self._names:
            return True
        if address := _address(host):
            return address.is_loopback or self._has_every_address
        is_below = bool(NAME.fullmatch(host)) and host.endswith(self._domains)
        return is_below or bool(PRIVATE_NAME.fullmatch(host))


class Origins:
    """Web origins whose pages may send requests: as browsers send them, `app://*` and the like, or
    `*`. `pattern` is the regular expression of all of them.
    """

    def __init__(self, allowed: Sequence[str]) -> None:
        patterns = [re.escape(origin).replace(r"\*", ".*") for origin in allowed]
        self.pattern = "|".join(patterns) or "(?!)"

    def has(self, origin: str) -> bool:
        """Whether an Origin header is one of them."""
        return re.fullmatch(self.pattern, origin) is not None


def is_host_name(text: str) -> bool:
    """Whether `text` may stand in the setting `allowed_host`: a name, an address, or `*.` and a
    name; without a port.
    """
    name = text.lower()
    return bool(NAME.fullmatch(name.removeprefix(BELOW))) or _address(name.strip("[]")) is not None


def is_origin(text: str) -> bool:
    """Whether `text` may stand in the setting `cors_origin`."""
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


def _shortest(host: str) -> str:
    """An address as browsers send it, however it was written; a name as it is."""
    return str(_address(host) or host)


def _address(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
