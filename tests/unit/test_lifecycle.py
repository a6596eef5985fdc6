"""What a signal does to a server, wherever it comes."""

import faulthandler
import gc
import io
import logging
import signal
import socket
import sys
from collections.abc import Iterator

import pytest
from fastapi import FastAPI
from typer.testing import CliRunner

from server.serve import DrainingServer
from server.settings import Settings
from server.terminal import serve
from tests.contract.daemon import registry_of
from tests.contract.fake_engine import FakeEngine


class Interrupted(io.StringIO):
    """A stream in whose writing a signal comes. Like a buffered file it cannot be entered again."""

    def __init__(self, server: DrainingServer) -> None:
        super().__init__()
        self._server = server
        self._is_writing = False

    def write(self, text: str) -> int:
        if self._is_writing:
            raise RuntimeError("reentrant call")
        self._is_writing = True
        self._server.handle_exit(signal.SIGTERM, None)
        self._is_writing = False
        return super().write(text)


@pytest.fixture
def handlers_put_back() -> Iterator[None]:
    """And this process is not ended."""
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in signals]
    yield
    faulthandler.cancel_dump_traceback_later()
    for number, handler in zip(signals, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers_put_back")
def test_a_signal_in_the_midst_of_a_line_of_the_log_is_not_lost(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "rootstock")
    server = DrainingServer(FastAPI(), FakeEngine(), Settings())
    stream = Interrupted(server)
    monkeypatch.setattr(sys, "stderr", stream)
    handler = logging.StreamHandler(stream)
    log = logging.getLogger("rootstock")
    log.addHandler(handler)
    try:
        log.error("a line")
    finally:
        log.removeHandler(handler)
    assert server.should_exit
    assert "a line" in stream.getvalue()


@pytest.fixture
def collector_put_back() -> Iterator[None]:
    """The garbage collector looks at what is there again, and as often as before."""
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


@pytest.mark.usefixtures("collector_put_back")
def test_what_has_loaded_is_no_work_for_the_garbage_collector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Full collections stop every thread, the engine's with the others: they are rare, too."""
    engine = FakeEngine()
    young, middle, full = gc.get_threshold()
    seen = []

    async def serve_nobody(server: DrainingServer, sockets: list[socket.socket]) -> None:
        is_looked_at = any(one is engine for one in gc.get_objects())
        seen.append((is_looked_at, gc.get_threshold()))

    monkeypatch.setattr(serve, "configure_logging", lambda level, edited: None)
    models = registry_of(engine, Settings())
    monkeypatch.setattr(serve, "ModelRegistry", lambda settings, start: models)
    monkeypatch.setattr(DrainingServer, "serve", serve_nobody)
    assert CliRunner().invoke(serve.serve, ["--port", "0"]).exit_code == 0
    ((is_looked_at, thresholds),) = seen
    assert not is_looked_at
    if not full:
        pytest.skip("Python 3.14.0 to 3.14.4 have no full collections that a threshold could delay")
    assert thresholds == (young, middle, 100 * full)
