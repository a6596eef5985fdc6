"""The daemon's commands: `python -m server`."""

from server.terminal.cli import app

if __name__ == "__main__":
    app(prog_name="rootstock")
