"""The real server on a real socket, around any engine, in a thread of its own."""

import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

from fastapi import FastAPI

from engine.api import Engine
from server.app import create_app
from server.lifecycle import DrainingServer, bind, url
from server.metrics.metrics import EngineTelemetry
from server.settings import Settings
from server.terminal.launch.agents import AGENTS

START_SECONDS = 10
STOP_SECONDS = 30


class _ThreadedServer(DrainingServer):
    def __init__(self, app: FastAPI, engine: Engine, settings: Settings) -> None:
        super().__init__(app, engine, settings)
        self.ready = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()


@contextmanager
def running(
    engine: Engine,
    settings: Settings,
    telemetry: EngineTelemetry | None = None,
    socket_options: Mapping[int, int] = MappingProxyType({}),
) -> Iterator[str]:
    """The base URL, without `/v1`, of a daemon that stops (and drains the engine) at the end.

    Connections inherit the options of the listening socket.
    """
    with bind(settings) as bound:
        for option, value in socket_options.items():
            bound.setsockopt(socket.SOL_SOCKET, option, value)
        app = create_app(engine, settings, telemetry or EngineTelemetry(), tuple(AGENTS))
        server = _ThreadedServer(app, engine, settings)
        thread = threading.Thread(target=server.run, args=([bound],), name="server")
        thread.start()
        try:
            assert server.ready.wait(START_SECONDS)
            yield url(bound).removesuffix("/v1")
        finally:
            server.should_exit = True
            thread.join(STOP_SECONDS)
            assert not thread.is_alive()
