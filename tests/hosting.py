"""An engine behind the server's end of its connection, in a thread in place of a process."""

import asyncio
import socket
import subprocess
import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from engine.api import Engine
from engine.build import start
from engine.launch import launch
from engine.remote.engine import RemoteEngine
from engine.remote.host import Start, serve
from engine.thread import Build, EngineThread
from engine.values.model import Tokenizer
from engine.values.settings import EngineConfig

CONFIG = EngineConfig(model="")
EngineT = TypeVar("EngineT", bound=Engine)


class ThreadAsProcess:
    """Implements `ChildProcess`. It ends with its connection, and cannot be killed."""

    def __init__(self, connection: socket.socket, start: Start) -> None:
        self._connection = connection
        self._start = start
        # A daemon: an engine that a test leaves running does not keep pytest from ending.
        self._thread = threading.Thread(target=self._main, name="engine's process", daemon=True)
        self._thread.start()

    def wait(self, timeout: float | None = None) -> int:
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise subprocess.TimeoutExpired("thread", timeout or 0.0)
        return 0

    def kill(self) -> None:
        with suppress(OSError):  # macOS raises where the other end has closed
            self._connection.shutdown(socket.SHUT_RDWR)

    def _main(self) -> None:
        with self._connection:
            asyncio.run(serve(self._connection, self._start))


def launched(config: EngineConfig) -> Engine:
    """An engine in a process, for any event loop. For tests of what a process does: its imports
    take seconds.
    """
    return _run(launch(config, lambda line: None))


def loaded(config: EngineConfig) -> RemoteEngine:
    """The engine of a real model on a thread of this process, for any event loop."""
    return _run(RemoteEngine.start(partial(_start, start), config, lambda line: None))


def _run(start: Coroutine[Any, Any, EngineT]) -> EngineT:
    """On an event loop of its own, wherever this is called."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(asyncio.run, start).result()


def hosted(build: Build, tokenizer: Tokenizer) -> RemoteEngine:
    """What `launch` returns, around parts that need no process."""
    hosting = partial(_start, lambda config, report, *rest: EngineThread(build, *rest))
    return _run(RemoteEngine.start(hosting, CONFIG, lambda line: None, lambda card: tokenizer))


def _start(start_engine: Start) -> tuple[socket.socket, ThreadAsProcess]:
    ours, theirs = socket.socketpair()
    return ours, ThreadAsProcess(theirs, start_engine)
