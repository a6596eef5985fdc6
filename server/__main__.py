"""The `rootstock` command."""

from server.cli import app


def main() -> None:
    app()


if __name__ == "__main__":
    main()
