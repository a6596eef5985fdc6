"""Which Host headers are allowed while there are no API keys.

A web page's own name that suddenly resolves to this machine is how DNS rebinding gets past the
browser: page and daemon are one site then. The Host header still has the page's name.
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

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Hosts:
    """Which Host headers name this daemon, with or without a port.

    Loopback and private names do; so do `listening`, every address where that is all of them, and
    `allowed`, in which `*.example.org` is every name below. An address is safe from rebinding: only
    who has it can serve a page there.
    """

    def __init__(self, listening: str, allowed: Sequence[str] = ()) -> None:
        names = [_shortest(name.lower().strip("[]")) for name in (listening, *allowed)]
        self._names = frozenset(name for name in names if name)
        self._domains = tuple(name.removeprefix("*") for name in names if name.startswith(BELOW))
        address = _address(names[0])
        self._has_every_address = address is not None and address.is_unspecified

    def has(self, header: str) -> bool:
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


def is_host_name(text: str) -> bool:
    """Whether it can stand in `allowed`: a name, an address, or `*.` and a name; without a port."""
    name = text.lower()
    return bool(NAME.fullmatch(name.removeprefix(BELOW))) or _address(name.strip("[]")) is not None


def _shortest(host: str) -> str:
    """An address as browsers send it, however it was written; a name as it is."""
    return str(_address(host) or host)


def _address(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
