"""A daemon process over the fake engine, whose answers wait for a line on standard input."""

import sys
import threading

from server.app import create_app
from server.lifecycle import DrainingServer, bind
from server.log import configure_logging
from server.metrics.metrics import EngineTelemetry
from server.settings import load_settings
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
    app = create_app(engine, settings, EngineTelemetry())
    with bind(settings) as bound:
        DrainingServer(app, engine, settings).run(sockets=[bound])


if __name__ == "__main__":
    main()
