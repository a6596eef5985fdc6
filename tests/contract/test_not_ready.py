"""What clients get while the models are loaded that are to be there at start."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from anyio import Event, create_task_group, fail_after, wait_all_tasks_blocked
from anyio.lowlevel import checkpoint

from engine.api import Engine
from engine.values.settings import EngineConfig
from server.http.listening import listening, url
from server.serve import answering_not_ready
from server.settings import Settings
from server.terminal.client import Endpoint, served_models
from server.terminal.console import Starting, TerminalError
from server.terminal.endpoint import running_daemon
from server.terminal.serve import serve_models
from tests.contract.fake_engine import FakeEngine
from tests.polling import WAIT_SECONDS

MESSAGE = "The server is starting: its models are being loaded."


@asynccontextmanager
async def starting() -> AsyncIterator[str]:
    """The URL, without /v1, of a daemon that loads its models."""
    with listening("127.0.0.1", 0) as sockets:
        async with create_task_group() as tasks, answering_not_ready(sockets, tasks):
            yield url(sockets[0]).removesuffix("/v1")
            tasks.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/health", {"error": {"code": "server_starting"}}),
        ("/v1/chat/completions", {"error": {"code": "server_starting", "message": MESSAGE}}),
        ("/v1/messages", {"type": "error", "error": {"type": "overloaded_error"}}),
        ("/api/chat", {"error": MESSAGE}),
    ],
)
async def test_every_path_is_a_503_of_its_dialect(path: str, expected: dict[str, Any]) -> None:
    async with (
        starting() as base_url,
        httpx.AsyncClient(base_url=base_url, timeout=WAIT_SECONDS) as client,
    ):
        for answer in (await client.get(path), await client.post(path, content=b"x" * 10**6)):
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
            assert contains(answer.json(), expected)


def contains(found: Any, expected: Any) -> bool:
    """Whether all fields that are expected are there."""
    if isinstance(expected, dict):
        return all(contains(found[key], value) for key, value in expected.items())
    return bool(found == expected)


async def test_a_client_that_sends_nothing_or_no_http_disturbs_no_other() -> None:
    async with (
        starting() as base_url,
        httpx.AsyncClient(base_url=base_url, timeout=WAIT_SECONDS) as client,
    ):
        address = httpx.URL(base_url)
        for sent in (b"", b"\r\n\r\n", b"x" * 200_000):
            _, writer = await asyncio.open_connection(address.host, address.port)
            writer.write(sent)
            writer.close()
        assert (await client.get("/health")).status_code == 503


@pytest.mark.parametrize("n_turns", range(6))
async def test_a_client_that_comes_as_the_models_are_there_is_not_lost(n_turns: int) -> None:
    """It gets the 503, or waits for the server, whatever the event loop does in between."""
    with listening("127.0.0.1", 0) as sockets:
        async with create_task_group() as tasks:
            async with answering_not_ready(sockets, tasks):
                await wait_all_tasks_blocked()
                client = socket.create_connection(sockets[0].getsockname(), WAIT_SECONDS)
                client.sendall(b"GET /health HTTP/1.1\r\n\r\n")
                for _ in range(n_turns):
                    await checkpoint()
            with client:
                try:
                    sockets[0].accept()[0].close()
                except BlockingIOError:
                    answer = await asyncio.to_thread(client.recv, 1000)
                    assert answer.startswith(b"HTTP/1.1 503")


async def test_commands_say_that_a_daemon_is_starting_and_do_not_wait_for_it() -> None:
    async with starting() as base_url:
        port = httpx.URL(base_url).port or 0
        with pytest.raises(TerminalError, match=MESSAGE):
            await asyncio.to_thread(served_models, Endpoint(f"{base_url}/v1"))
        with pytest.raises(Starting, match=MESSAGE):
            await asyncio.to_thread(running_daemon, Settings(port=port), None)


async def test_requests_are_answered_by_the_models_as_soon_as_they_are_loaded() -> None:
    is_loaded = Event()

    async def load(config: EngineConfig, report: Callable[[str], None]) -> Engine:
        await is_loaded.wait()
        return FakeEngine()

    with listening("127.0.0.1", 0) as sockets, fail_after(WAIT_SECONDS):
        base_url = url(sockets[0]).removesuffix("/v1")
        async with (
            create_task_group() as tasks,
            httpx.AsyncClient(base_url=base_url, timeout=WAIT_SECONDS) as client,
        ):
            tasks.start_soon(serve_models, Settings(port=0), sockets, load)
            for _ in range(2):
                assert (await client.get("/health")).status_code == 503
            is_loaded.set()
            while (await client.get("/health")).status_code != 200:
                await checkpoint()
            tasks.cancel_scope.cancel()
