"""One connection's clocks and its place among the others, in a time of the test's own."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from server.http.connections import Connection, ConnectionLimits, Connections

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

    def __init__(self) -> None:
        super().__init__()
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

    def connect(self) -> tuple[Connection, Socket]:
        make = self.connections.guarding(self._inner)
        connection, socket = make(app_state={"app": "state"}), Socket()
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
    connection.request_complete()
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
    served.request_complete()
    idle.request_began()
    idle.request_complete()
    idle.request_ended()
    _, fourth = world.connect()
    assert [socket.closed for socket in (first, second, third, fourth)] == [0, 1, 0, 0]
    _, fifth = world.connect()
    assert [socket.closed for socket in (first, third, fourth, fifth)] == [0, 1, 0, 0]


@in_time
async def test_where_all_are_served_the_newcomer_is_closed(world: World) -> None:
    world = World(world.clock, max_connections=2)
    served = [world.connect() for _ in range(2)]
    for connection, _ in served:
        connection.request_began()
        connection.request_complete()
    assert world.connections.is_crowded
    _, newcomer = world.connect()
    assert newcomer.closed
    assert not any(socket.closed for _, socket in served)
    served[0][0].connection_lost(None)
    assert not world.connect()[1].closed


@pytest.mark.parametrize(("connections", "answering"), [(2, 1), (16, 15), (2048, 1920)])
def test_some_connections_are_left_for_the_health(connections: int, answering: int) -> None:
    assert ConnectionLimits(connections, 1.0, 1.0).max_answering == answering
