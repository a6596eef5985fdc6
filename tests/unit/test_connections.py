"""Where the daemon listens, how many connections it holds, and the clocks of each."""

import asyncio
import errno
import os
import resource
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from server.http.connections import (
    AcceptErrors,
    Connection,
    ConnectionLimits,
    Connections,
    allowed_connections,
)
from server.http.listening import listening, url

HEAD_SECONDS = 30.0
SEND_SECONDS = 45.0


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose time passes when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def time(self) -> float:
        return self.seconds

    async def passes(self, seconds: float) -> None:
        self.seconds += seconds
        for _ in range(3):
            await asyncio.sleep(0)


class Socket(asyncio.Transport):
    """A transport that holds what it is told to hold."""

    def __init__(self, address: str) -> None:
        super().__init__({"peername": (address, 1)})
        self.unsent = 0
        self.closed = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high == 0

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def close(self) -> None:
        self.closed = True

    abort = close


class World:
    """Some connections of one server."""

    def __init__(self, clock: Clock, max_connections: int = 100) -> None:
        self.clock = clock
        limits = ConnectionLimits(max_connections, HEAD_SECONDS, SEND_SECONDS)
        self.connections = Connections(limits)
        self.states: list[dict[str, Any]] = []

    def connect(self, address: str = "127.0.0.1") -> tuple[Connection, Socket]:
        make = self.connections.guarding(self._inner)
        connection, socket = make(app_state={"app": "state"}), Socket(address)
        assert isinstance(connection, Connection)
        connection.connection_made(socket)
        return connection, socket

    def _inner(self, *, app_state: dict[str, Any]) -> asyncio.Protocol:
        self.states.append(app_state)
        return asyncio.Protocol()


def in_time(test: Callable[[World], Awaitable[None]]) -> Callable[[], None]:
    """The test as a coroutine on a clock of its own."""

    def run() -> None:
        with asyncio.Runner(loop_factory=Clock) as runner:
            clock = runner.get_loop()
            assert isinstance(clock, Clock)
            runner.run(_awaited(test(World(clock))))

    return run


async def _awaited(test: Awaitable[None]) -> None:
    await test


@in_time
async def test_a_request_finds_its_connection_beside_the_applications_state(world: World) -> None:
    connection, _ = world.connect()
    assert world.states == [{"app": "state", "connection": connection}]


@in_time
async def test_bytes_do_not_stop_the_clock_of_a_head(world: World) -> None:
    connection, socket = world.connect()
    for _ in range(29):
        connection.data_received(b"x")
        await world.clock.passes(1.0)
    assert not socket.closed
    await world.clock.passes(1.0)
    assert socket.closed


@in_time
async def test_a_request_that_began_is_not_timed(world: World) -> None:
    connection, socket = world.connect()
    connection.data_received(b"GET /")
    connection.request_began()
    connection.data_received(b"a body")
    await world.clock.passes(10 * HEAD_SECONDS)
    assert not socket.closed


@in_time
async def test_an_idle_connection_is_timed_from_its_next_byte(world: World) -> None:
    connection, socket = world.connect()
    connection.request_began()
    connection.request_complete("a")
    connection.request_ended()
    await world.clock.passes(10 * HEAD_SECONDS)
    assert not socket.closed
    connection.data_received(b"GE")
    await world.clock.passes(HEAD_SECONDS)
    assert socket.closed


@in_time
async def test_a_client_that_takes_nothing_is_closed(world: World) -> None:
    connection, socket = world.connect()
    connection.request_began()
    socket.unsent = 1000
    connection.pause_writing()
    await world.clock.passes(SEND_SECONDS - 1)
    assert not socket.closed
    await world.clock.passes(1.0)
    assert socket.closed


@in_time
async def test_a_client_that_takes_a_byte_now_and_then_is_kept(world: World) -> None:
    connection, socket = world.connect()
    connection.request_began()
    socket.unsent = 10
    connection.pause_writing()
    for _ in range(9):
        socket.unsent -= 1
        await world.clock.passes(SEND_SECONDS)
    assert not socket.closed
    connection.resume_writing()  # all taken, and more comes at once
    socket.unsent = 10
    connection.pause_writing()
    await world.clock.passes(SEND_SECONDS)
    assert not socket.closed
    await world.clock.passes(SEND_SECONDS)
    assert socket.closed


@in_time
async def test_nothing_unsent_is_not_timed(world: World) -> None:
    connection, socket = world.connect()
    connection.request_began()
    connection.pause_writing()
    connection.resume_writing()
    await world.clock.passes(10 * SEND_SECONDS)
    assert not socket.closed


@in_time
async def test_a_request_is_flushed_when_its_client_has_taken_all_or_is_gone(world: World) -> None:
    for let_go in (Connection.resume_writing, lambda gone: gone.connection_lost(None)):
        connection, _ = world.connect()
        await connection.flushed()
        connection.pause_writing()
        waiting = asyncio.ensure_future(connection.flushed())
        await world.clock.passes(0.0)
        assert not waiting.done()
        let_go(connection)
        await waiting


@in_time
async def test_a_connection_too_many_closes_the_one_that_is_silent_longest(world: World) -> None:
    world = World(world.clock, max_connections=3)
    (served, first), (_, second), (idle, third) = (world.connect() for _ in range(3))
    served.request_began()
    served.request_complete("a")
    idle.request_began()
    idle.request_complete("a")
    idle.request_ended()
    _, fourth = world.connect()
    assert [socket.closed for socket in (first, second, third, fourth)] == [0, 1, 0, 0]
    _, fifth = world.connect()
    assert [socket.closed for socket in (first, third, fourth, fifth)] == [0, 1, 0, 0]


@in_time
async def test_a_flood_of_connections_closes_those_of_its_own_address(world: World) -> None:
    world = World(world.clock, max_connections=3)
    _, other = world.connect("10.0.0.2")
    flood = [world.connect("10.0.0.1")[1] for _ in range(10)]
    assert [socket.closed for socket in flood] == [1] * 8 + [0] * 2
    assert not other.closed


@in_time
async def test_a_client_with_few_requests_is_served_next_to_one_with_too_many(world: World) -> None:
    world = World(world.clock, max_connections=64)
    full = world.connections.is_full_for

    def serve(client: str) -> Connection:
        connection, _ = world.connect()
        connection.request_began()
        connection.request_complete(client)
        return connection

    flood = [serve("flood") for _ in range(60)]
    assert (full("flood"), full("other")) == (True, False)
    others = [serve("other"), serve("third")]
    assert (full("flood"), full("other")) == (True, True), "the last two are for the health"
    others[0].request_ended()
    assert (full("flood"), full("other")) == (True, False)
    for connection in flood[:31]:
        connection.request_ended()
    assert (full("flood"), full("other")) == (False, False)


@in_time
async def test_where_all_are_served_the_newcomer_is_closed(world: World) -> None:
    world = World(world.clock, max_connections=2)
    served = [world.connect() for _ in range(2)]
    for connection, _ in served:
        connection.request_began()
        connection.request_complete("a")
    assert world.connections.is_full_for("a")
    _, newcomer = world.connect()
    assert newcomer.closed
    assert not any(socket.closed for _, socket in served)
    served[0][0].connection_lost(None)
    assert not world.connect()[1].closed


@pytest.mark.parametrize(("connections", "answering"), [(2, 1), (16, 15), (2048, 1920)])
def test_some_connections_are_left_for_the_health(connections: int, answering: int) -> None:
    assert ConnectionLimits(connections, 1.0, 1.0).max_answering == answering


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6")


@contextmanager
def program(host: str = "127.0.0.1") -> Iterator[int]:
    """Another program that listens; its port."""
    with socket.create_server((host, 0)) as listener:
        yield listener.getsockname()[1]


def name_of(*hosts: str) -> Callable[..., list[tuple[object, ...]]]:
    """A `getaddrinfo` by which every name has these addresses. macOS lists ::1 first of localhost,
    and /etc/hosts may list an address twice.
    """

    def getaddrinfo(host: str, port: int, **options: int) -> list[tuple[object, ...]]:
        return [
            (socket.AF_INET6, socket.SOCK_STREAM, 6, "", (each, port, 0, 0))
            if ":" in each
            else (socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port))
            for each in hosts
        ]

    return getaddrinfo


class BsdSocket(socket.socket):
    """Binds to one address while a program listens on all, and the other way round, as on BSD."""

    def bind(self, address: tuple[str, int]) -> None:  # type: ignore[override]
        super().bind((address[0], 0))


def ports(sockets: Sequence[socket.socket]) -> list[int]:
    return [listener.getsockname()[1] for listener in sockets]


def test_only_one_of_two_daemons_that_load_gets_a_port() -> None:
    with listening("127.0.0.1", 0) as sockets:
        (port,) = ports(sockets)
        with pytest.raises(OSError, match="in use") as refused, listening("127.0.0.1", port):
            pass
    assert refused.value.errno == errno.EADDRINUSE
    with listening("127.0.0.1", port) as sockets:
        assert ports(sockets) == [port]


@pytest.mark.parametrize(("theirs", "ours"), [("0.0.0.0", "127.0.0.1"), ("127.0.0.1", "0.0.0.0")])
def test_a_port_on_which_another_program_answers_is_taken(
    monkeypatch: pytest.MonkeyPatch, theirs: str, ours: str
) -> None:
    with program(theirs) as port:
        monkeypatch.setattr(socket, "socket", BsdSocket)
        with pytest.raises(OSError, match="in use"), listening(ours, port):
            pass


@needs_ipv6
def test_it_listens_at_all_addresses_of_a_name_on_one_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as names:
        names.setattr(socket, "getaddrinfo", name_of("::1", "127.0.0.1", "127.0.0.1"))
        with listening("localhost", 0) as sockets:
            port, other_port = ports(sockets)
            assert port == other_port
            expected = [f"http://[::1]:{port}/v1", f"http://127.0.0.1:{port}/v1"]
            assert [url(each) for each in sockets] == expected
            names.undo()
            for host in ("::1", "127.0.0.1"):
                socket.create_connection((host, port), 10).close()


@needs_ipv6
def test_a_port_that_is_taken_at_one_address_is_given_back_at_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with program() as port:
        monkeypatch.setattr(socket, "getaddrinfo", name_of("::1", "127.0.0.1"))
        with pytest.raises(OSError, match="in use"), listening("localhost", port):
            pass
        monkeypatch.setattr(socket, "getaddrinfo", name_of("::1"))
        with listening("localhost", port) as sockets:
            assert ports(sockets) == [port]


@needs_ipv6
def test_a_free_port_is_free_at_all_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel chooses it for the first address alone."""
    with program() as taken:
        chosen = iter((taken, 0))

        class ChoosingSocket(socket.socket):
            def bind(self, address: tuple[str, int]) -> None:  # type: ignore[override]
                port = next(chosen) if self.family == socket.AF_INET6 else address[1]
                super().bind((address[0], port))

        monkeypatch.setattr(socket, "getaddrinfo", name_of("::1", "127.0.0.1"))
        monkeypatch.setattr(socket, "socket", ChoosingSocket)
        with listening("localhost", 0) as sockets:
            port, other_port = ports(sockets)
            assert port == other_port != taken


def test_an_address_that_the_machine_lacks_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """/etc/hosts lists ::1 on machines without IPv6, too."""
    monkeypatch.setattr(socket, "getaddrinfo", name_of("2001:db8::1", "127.0.0.1"))
    with listening("localhost", 0) as sockets:
        assert [each.getsockname()[0] for each in sockets] == ["127.0.0.1"]
    monkeypatch.setattr(socket, "getaddrinfo", name_of("192.0.2.1"))
    with pytest.raises(OSError, match="assign requested address"), listening("elsewhere", 0):
        pass


class MacLimits:
    """The limit of open files as macOS has it: 256 until it is raised, and at most `most` however
    high the hard limit is.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.soft = 256

    def get(self, which: int) -> tuple[int, int]:
        assert which == resource.RLIMIT_NOFILE
        return self.soft, resource.RLIM_INFINITY

    def set(self, which: int, limits: tuple[int, int]) -> None:
        assert which == resource.RLIMIT_NOFILE
        if limits[0] > self.most:
            raise ValueError("current limit exceeds maximum limit")
        self.soft, _ = limits


def write_sysctl(folder: Path, script: str) -> None:
    """The command `sysctl`, which answers for the kernel."""
    command = folder / "sysctl"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)


SAYS_61440 = 'test "$*" = "-n kern.maxfilesperproc" && echo 61440'


@pytest.mark.parametrize(
    ("wanted", "script", "soft", "allowed"),
    [
        (2048, SAYS_61440, 2048 + 128, 2048),
        (65_536, SAYS_61440, 61_440, 61_440 - 128),
        (65_536, "exit 1", 10_240, 10_240 - 128),
        (65_536, "echo many", 10_240, 10_240 - 128),
        (65_536, None, 10_240, 10_240 - 128),
        (65_536, "echo 99999999", 10_240, 10_240 - 128),
    ],
)
def test_the_limit_is_raised_as_far_as_macos_allows(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wanted: int,
    script: str | None,
    soft: int,
    allowed: int,
) -> None:
    limits = MacLimits(61_440)
    monkeypatch.setattr(resource, "getrlimit", limits.get)
    monkeypatch.setattr(resource, "setrlimit", limits.set)
    monkeypatch.setenv("PATH", str(tmp_path))
    if script is not None:
        write_sysctl(tmp_path, script)
    assert allowed_connections(wanted) == allowed
    assert limits.soft == soft


def failed(number: int) -> dict[str, object]:
    """The event loop's complaint, as asyncio makes it."""
    return {"message": "accept", "exception": OSError(number, os.strerror(number))}


async def test_out_of_descriptors_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    handler, loop = AcceptErrors(), asyncio.get_running_loop()
    for _ in range(2048):
        handler(loop, failed(errno.EMFILE))
    assert [record.message for record in caplog.records] == [
        "cannot accept connections: Too many open files"
    ]


async def test_other_errors_are_told_in_full(caplog: pytest.LogCaptureFixture) -> None:
    handler, loop = AcceptErrors(), asyncio.get_running_loop()
    handler(loop, failed(errno.EINVAL))
    handler(loop, {"message": "something else"})
    assert [record.name for record in caplog.records] == ["asyncio", "asyncio"]
    assert caplog.records[0].exc_info
