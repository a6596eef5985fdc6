"""A daemon process over the fake engine, whose answers wait for a line on standard input."""

import asyncio
import sys
import threading

from server.http.listening import listening
from server.serve import configure_logging
from server.settings import load_settings
from server.terminal.serve import serve_models
from tests.contract.daemon import Starts
from tests.contract.fake_engine import FakeEngine, Gate, Script


def open_on_a_line(gate: Gate) -> None:
    sys.stdin.readline()
    gate.open()


def main() -> None:
    settings = load_settings({"port": 0})
    configure_logging(settings.log_level)
    gate = Gate()
    threading.Thread(target=open_on_a_line, args=[gate], daemon=True).start()
    engine = FakeEngine(Script(gate=gate))
    with listening(settings.host, settings.port) as sockets:
        asyncio.run(serve_models(settings, sockets, Starts(engine)))


if __name__ == "__main__":
    main()
