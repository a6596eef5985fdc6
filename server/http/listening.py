"""Addresses and URLs of daemons, and the sockets that this one listens on: all addresses of its
host, on one port.
"""

import errno
import ipaddress
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any, TypeAlias

Address: TypeAlias = tuple[socket.AddressFamily, tuple[Any, ...]]

LISTEN_BACKLOG = 2048
SEND_BUFFER_BYTES = 128 * 1024  # of the kernel, which would keep megabytes for who does not read
PROBE_SECONDS = 1.0
FREE_PORT_TRIES = 10
LOOPBACK = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}
WILDCARDS = {"0.0.0.0", "::"}
NOT_HERE = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}  # /etc/hosts lists ::1 without IPv6, too


@contextmanager
def listening(host: str, port: int) -> Iterator[list[socket.socket]]:
    """Listen until the context ends, on a free port if `port` is 0. Raises OSError at its
    beginning, also where another program has the port.

    It listens at once and not only when the models are loaded: Linux lets two sockets bind to one
    port as long as neither listens. macOS also lets one bind to 127.0.0.1 while another listens on
    all addresses, so the port is tried out first.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    addresses: list[Address] = list(dict.fromkeys((each[0], each[4]) for each in found))
    with ExitStack() as held:
        for tries_left in reversed(range(1 if port else FREE_PORT_TRIES)):
            try:
                sockets = _listen(addresses, port)
                break
            except OSError as error:  # another program has the free port at another address
                if error.errno != errno.EADDRINUSE or not tries_left:
                    raise
        for listener in sockets:
            held.enter_context(listener)
        yield sockets


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address or name."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def base_url(host: str, port: int) -> str:
    """The base URL for OpenAI's clients of a daemon at the host."""
    return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"


def url(listener: socket.socket) -> str:
    """The OpenAI base URL of a socket that listens."""
    host, port = listener.getsockname()[:2]
    return base_url(host, port)


def _listen(addresses: Sequence[Address], port: int) -> list[socket.socket]:
    """Listen at all addresses that this machine has, on the port that the first one gets."""
    sockets, missing = list[socket.socket](), OSError(errno.EADDRNOTAVAIL, "no address")
    with ExitStack() as undo:
        for family, (host, _, *scope) in addresses:
            try:
                listener = _listener(family, (host, port, *scope), len(addresses) == 1)
            except OSError as error:
                if error.errno not in NOT_HERE:
                    raise
                missing = error
                continue
            sockets.append(undo.enter_context(listener))
            port = listener.getsockname()[1]
        if not sockets:
            raise missing
        undo.pop_all()
    return sockets


def _listener(
    family: socket.AddressFamily, address: tuple[Any, ...], is_alone: bool
) -> socket.socket:
    if _is_answered(family, address):
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    with ExitStack() as undo:
        listener = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        if family == socket.AF_INET6 and not is_alone:  # else `::` takes the port of IPv4, too
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(LISTEN_BACKLOG)
        undo.pop_all()
    return listener


def _is_answered(family: socket.AddressFamily, address: tuple[Any, ...]) -> bool:
    """Whether a program accepts connections there, at the address that a client would use."""
    host, port, *scope = address
    if not port:
        return False
    with closing(socket.socket(family, socket.SOCK_STREAM)) as probe, suppress(OSError):
        probe.settimeout(PROBE_SECONDS)
        probe.connect((LOOPBACK[family] if host in WILDCARDS else host, port, *scope))
        return bool(probe.getsockname() != probe.getpeername())  # a socket may reach itself
    return False
