"""The commands `rootstock` and `rootstock-serve`, in a clone and as installed."""

import sys
from pathlib import Path


def main() -> None:
    # A wheel carries `server`, `measuring`, `engine` and `kvstore` inside this package; they import
    # each other by these names. In a clone they lie next to it.
    sys.path.insert(0, str(Path(__file__).parent))
    from server.terminal.cli import app  # noqa: PLC0415  # not to be found before

    app()


if __name__ == "__main__":
    main()
