"""`python tools/free_port.py PORT [OPTION ...]`: may the daemon have its port?

`make serve` asks before it installs anything, with the interpreter of the system and no package.
PORT is what `make serve PORT=` was given, or empty; the options are those of `rootstock serve`.
The daemon tries the port again, as its configuration says: a file of `--config` is not read here.
"""

import os
import socket
import sys
from collections.abc import Mapping, Sequence

DEFAULT_PORT = 8000


def main() -> None:
    """Exit with a message where another program has the port."""
    port = asked_port(sys.argv[1], sys.argv[2:], os.environ)
    if port and is_taken(port):
        free = next(other for other in range(port + 1, port + 1000) if not is_taken(other))
        sys.exit(
            f"Port {port} is taken, perhaps by another Rootstock. Choose a free one: "
            f"make serve PORT={free}"
        )


def asked_port(port: str, options: Sequence[str], environment: Mapping[str, str]) -> int | None:
    """The port that the daemon will take: of make, of an option, of the environment, its own. None
    where that is for it to find out, or to refuse.
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
    """Whether a program listens on the loopback's port."""
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
