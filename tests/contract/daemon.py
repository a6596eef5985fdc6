"""The real server on a real socket, around any engine, in a thread of its own."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

from anyio import create_task_group
from fastapi import FastAPI

from engine.api import Engine, ModelError
from engine.values.settings import EngineConfig
from server.app import create_app
from server.dialects.warming import read_warm_prompt
from server.http.listening import listening, url
from server.models.model import public_name
from server.models.registry import ModelRegistry
from server.pressure.guard import MemoryGuard
from server.serve import DrainingServer
from server.settings import Settings
from server.terminal.serve import page_launch
from tests.polling import WAIT_SECONDS


class _ThreadedServer(DrainingServer):
    def __init__(self, app: FastAPI, models: ModelRegistry, settings: Settings) -> None:
        super().__init__(app, models, settings)
        self.ready = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()


class Starts:
    """Starts an engine that is there already, once."""

    def __init__(self, engine: Engine) -> None:
        self._engines = [engine]

    async def __call__(self, config: EngineConfig, report: Callable[[str], None]) -> Engine:
        if not self._engines:
            raise ModelError("it was loaded once")
        return self._engines.pop()


def registry_of(engine: Engine, settings: Settings) -> ModelRegistry:
    """One model, called as its card says where the settings do not name it."""
    if not settings.served_model_name and not settings.model:
        settings = settings.model_copy(
            update={"served_model_name": (public_name(engine.card.name),)}
        )
    return ModelRegistry(settings, Starts(engine))


async def serve(
    models: ModelRegistry, server: DrainingServer, sockets: list[socket.socket]
) -> None:
    """Until it is told to exit."""
    async with create_task_group() as tasks:
        await tasks.start(models.run, read_warm_prompt)
        await models.preload()
        await server.serve(sockets=sockets)
        tasks.cancel_scope.cancel()


@contextmanager
def running(
    engine: Engine,
    settings: Settings,
    socket_options: Mapping[int, int] = MappingProxyType({}),
) -> Iterator[str]:
    """The base URL, without `/v1`, of a daemon that stops (and drains the engine) at the end.

    Connections inherit the options of the listening socket.
    """
    with serving(registry_of(engine, settings), settings, socket_options) as base_url:
        yield base_url


@contextmanager
def serving(
    models: ModelRegistry,
    settings: Settings,
    socket_options: Mapping[int, int] = MappingProxyType({}),
    guard: MemoryGuard | None = None,
) -> Iterator[str]:
    """Likewise, of any models. Without `guard` the memory of the machine is not watched."""
    with listening(settings.host, settings.port) as sockets:
        for option, value in socket_options.items():
            for listener in sockets:
                listener.setsockopt(socket.SOL_SOCKET, option, value)
        app = create_app(models, settings, page_launch(), guard)
        server = _ThreadedServer(app, models, settings)

        def main() -> None:
            with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
                runner.run(serve(models, server, sockets))

        thread = threading.Thread(target=main, name="server")
        thread.start()
        try:
            assert server.ready.wait(WAIT_SECONDS)
            yield url(sockets[0]).removesuffix("/v1")
        finally:
            server.should_exit = True
            thread.join(WAIT_SECONDS)
            assert not thread.is_alive()
