"""The cache as it moves: who watches sees the latest, and whoever leaves leaves nothing behind."""

import asyncio
import gc
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from engine.values.tree import TreeChanges, TreeNamespace, TreeSnapshot
from server.admin import watch
from server.settings import Settings
from tests.contract.daemon import running
from tests.contract.fake_engine import PICTURE, FakeEngine, Script
from tests.contract.scripted import CLIENT_SECONDS
from tests.polling import until

STREAM = "/admin/cache/tree/stream"
SOON_SECONDS = 20.0


class LoopKeepingEngine(FakeEngine):
    """Lets a test see the tasks of the server's event loop, and moves if it is told to."""

    moves = False
    server_loop: asyncio.AbstractEventLoop

    async def tree(self, since: int) -> TreeSnapshot | TreeChanges:
        self.server_loop = asyncio.get_running_loop()
        if self.moves:
            self.picture = moved(self.picture)
        return await super().tree(since)


def moved(picture: TreeSnapshot) -> TreeSnapshot:
    return replace(picture, version=picture.version + 1)


@pytest.fixture
def watched() -> LoopKeepingEngine:
    return LoopKeepingEngine()


@pytest.fixture
def url(watched: LoopKeepingEngine, no_settings_from_outside: None) -> Iterator[str]:
    with running(watched, Settings(port=0, keepalive_seconds=0.2)) as url:
        yield url


@contextmanager
def listening(url: str) -> Iterator[Iterator[str]]:
    """The lines of a stream."""
    with httpx.stream("GET", f"{url}{STREAM}", timeout=CLIENT_SECONDS) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield answer.iter_lines()


def pictures(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def test_it_speaks_only_when_something_has_moved(url: str, watched: LoopKeepingEngine) -> None:
    with listening(url) as lines:
        seen = pictures(lines)
        assert next(seen)["version"] == 1
        looks = watched.looks
        watched.picture = replace(PICTURE, time=0.0)  # which is not to move
        until(lambda: watched.looks >= looks + 2)
        watched.picture = replace(PICTURE, version=2)
        assert next(seen)["version"] == 2


def test_silence_is_kept_alive(url: str) -> None:
    with listening(url) as lines:
        heard = [next(lines) for _ in range(4)]
    assert heard[0].startswith("data: ")
    assert ": keep-alive" in heard


def test_an_engine_is_asked_once_a_second_whoever_watches(
    url: str, watched: LoopKeepingEngine
) -> None:
    with ExitStack() as stack:
        watchers = []  # a stream that nobody refers to is closed
        for path in (STREAM, "/admin/activity/stream") * 4:
            stream = httpx.stream("GET", f"{url}{path}", timeout=CLIENT_SECONDS)
            watchers.append(stack.enter_context(stream).iter_lines())
            next(line for line in watchers[-1] if line.startswith("data: "))
        looks, began = watched.looks, time.monotonic()
        until(lambda: watched.looks >= looks + 3)
        assert time.monotonic() - began >= 2 * watch.INTERVAL_SECONDS


def test_the_stream_ends_with_the_engine(url: str, watched: LoopKeepingEngine) -> None:
    with listening(url) as lines:
        next(pictures(lines))
        watched.script = Script(dead=True)
        assert not list(pictures(lines))


def test_a_daemon_that_stops_is_not_held_up_by_who_watches() -> None:
    with ExitStack() as daemon:
        url = daemon.enter_context(running(FakeEngine(), Settings(port=0)))
        with listening(url) as lines:
            seen = pictures(lines)
            next(seen)
            daemon.close()  # which waits for less time than a stream is given to end
            assert not list(seen)


def test_a_daemon_that_stops_waits_for_no_watcher_to_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise its thread would still be there after the time that it has to stop."""
    monkeypatch.setattr(watch, "LINGER_SECONDS", 3600.0)
    with running(FakeEngine(), Settings(port=0)) as url, listening(url) as lines:
        next(pictures(lines))


def test_a_slow_reader_gets_the_latest_and_not_all(
    monkeypatch: pytest.MonkeyPatch, watched: LoopKeepingEngine
) -> None:
    monkeypatch.setattr(watch, "INTERVAL_SECONDS", 0.005)
    monkeypatch.setattr(watch, "MIN_CACHE_SECONDS", 0.005)
    monkeypatch.setattr(watch, "SHARE", 1.0)
    watched.moves = True
    large = tuple(TreeNamespace(f"{i:012x}", f"salted {i}", 1, 1) for i in range(2000))
    watched.picture = replace(PICTURE, namespaces=large)
    options = {socket.SO_SNDBUF: 16 * 1024}
    with running(watched, Settings(port=0), socket_options=options) as url:
        address = urlsplit(url)
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * 1024)
            connection.settimeout(SOON_SECONDS)
            connection.connect((address.hostname, address.port))
            connection.sendall(f"GET {STREAM} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            until(lambda: watched.looks >= 100)
            with connection.makefile("rb") as received:
                versions = (
                    int(line.partition(b'"version":')[2].partition(b",")[0])
                    for line in received
                    if line.startswith(b"data: ")
                )
                early = [next(versions) for _ in range(10)]
    assert early[0] < 10
    assert early[-1] > 90


def test_fifty_who_come_and_go_leave_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, url: str, watched: LoopKeepingEngine
) -> None:
    monkeypatch.setattr(watch, "LINGER_SECONDS", 0.05)
    monkeypatch.setattr(watch, "INTERVAL_SECONDS", 0.01)
    monkeypatch.setattr(watch, "MIN_CACHE_SECONDS", 0.01)  # each waits for the next
    come_and_go(url, 5)  # whatever is made once, workers among it
    until(lambda: not frames())
    tasks, threads = n_tasks(watched), threading.active_count()
    come_and_go(url, 50)
    until(lambda: n_tasks(watched) <= tasks)
    assert threading.active_count() <= threads
    until(lambda: not frames())


def come_and_go(url: str, n: int) -> None:
    """At once, each for a picture; all leave in the midst of the stream."""
    with ExitStack() as stack:
        for lines in [stack.enter_context(listening(url)) for _ in range(n)]:
            next(pictures(lines))


def frames() -> list[object]:
    gc.collect()
    return [each for each in gc.get_objects() if type(each) is watch.Frame]


def n_tasks(engine: LoopKeepingEngine) -> int:
    return len(asyncio.all_tasks(engine.server_loop))
