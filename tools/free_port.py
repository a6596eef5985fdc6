"""`python tools/free_port.py PORT [OPTION ...]`: checks that the daemon's port is free.

`make serve` runs it before it installs anything, with the system's interpreter and no packages.
PORT is the value of `make serve PORT=`, or empty; the options are those of `rootstock serve`. A
file of `--config` is not read here: the daemon checks the port that it names.
"""

import os
import socket
import sys
from collections.abc import Mapping, Sequence

DEFAULT_PORT = 8000


def main() -> None:
    """Exit with a message if another program has the port."""
    port = asked_port(sys.argv[1], sys.argv[2:], os.environ)
    if port and is_taken(port):
        free = next(other for other in range(port + 1, port + 1000) if not is_taken(other))
        sys.exit(
            f"Port {port} is taken, perhaps by another Rootstock. Choose a free one: "
            f"make serve PORT={free}"
        )


def asked_port(port: str, options: Sequence[str], environment: Mapping[str, str]) -> int | None:
    """The port that the daemon will listen on: of make, else of an option, the environment, or its
    default. None if a YAML file may set it, or if it is not valid, which the daemon reports.
    """
    named = port or _option(options) or environment.get("ROOTSTOCK_PORT", "")
    if not named:
        has_config = any(each.split("=")[0] == "--config" for each in options)
        return None if has_config or "ROOTSTOCK_CONFIG" in environment else DEFAULT_PORT
    return int(named) if named.isdecimal() and 0 < int(named) < 2**16 else None


def _option(options: Sequence[str]) -> str:
    for option, following in zip(options, [*options[1:], ""], strict=False):
        name, _, value = option.partition("=")
        if name == "--port":
            return value or following
    return ""


def is_taken(port: int) -> bool:
    """Whether a program listens on this port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except PermissionError:
            return False  # a privileged port: the daemon says so
        except OSError:
            return True
    return False


if __name__ == "__main__":
    main()
