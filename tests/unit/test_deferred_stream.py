"""Streams whose client does not read. What others see of them: tests/contract."""

from collections.abc import Awaitable, Callable

from anyio import Event, create_task_group, current_time, sleep, sleep_forever
from starlette.types import Message

from server.errors import ApiError
from server.http.stream import EVENT_STREAM, DeferredStream
from server.record import Principal, RequestRecord

NEVER = 3600.0
SOON = 0.02
FAILED = b"failed"

Send = Callable[[Message], Awaitable[None]]


def record() -> RequestRecord:
    return RequestRecord("r", Principal("a"), deadline=current_time() + NEVER)


def stream(
    fill: Callable[[DeferredStream], Awaitable[None]], keepalive_seconds: float = NEVER
) -> DeferredStream:
    return DeferredStream(
        EVENT_STREAM,
        fill,
        keepalive_seconds,
        keep_alive=lambda: b"alive",
        failure=lambda error: FAILED,
    )


async def sent(response: DeferredStream, record: RequestRecord, send: Send | None = None) -> bytes:
    """The body that is sent, after "begun|" if there was a status line."""
    said: list[bytes] = []

    async def receive() -> Message:
        await sleep_forever()
        raise AssertionError("it was cancelled")

    async def note(message: Message) -> None:
        said.append(b"begun" if message["type"] == "http.response.start" else message["body"])
        if send is not None:
            await send(message)

    await response({"type": "http", "state": {"record": record}}, receive, note)
    return b"|".join(said)


async def test_nothing_is_added_for_a_client_that_does_not_read() -> None:
    async def fill(stream: DeferredStream) -> None:
        await stream.write(b"one")

    async def slow(message: Message) -> None:
        if message.get("body") == b"one":
            await sleep(5 * SOON)

    assert await sent(stream(fill, SOON), record(), slow) == b"begun|one|"


async def test_a_stream_that_writes_in_time_gets_no_keep_alives() -> None:
    """However long it lasts: silence is counted from the last write."""
    pause_seconds, n_parts = 0.2, 6

    async def fill(stream: DeferredStream) -> None:
        for _ in range(n_parts):
            await sleep(pause_seconds)
            await stream.write(b"part")

    said = await sent(stream(fill, keepalive_seconds=(n_parts - 1) * pause_seconds), record())
    assert said == "|".join(["begun", *["part"] * n_parts, ""]).encode()


async def test_a_request_is_ended_although_its_client_does_not_read() -> None:
    """The work ends at once; the client gets the error when it reads on."""
    is_full, ended, reads = Event(), Event(), Event()
    request = record()

    async def fill(stream: DeferredStream) -> None:
        try:
            await stream.write(b"one")
        finally:
            ended.set()

    async def full(message: Message) -> None:
        if message.get("body") == b"one":
            is_full.set()
        if message["type"] == "http.response.body":
            await reads.wait()

    async def serve() -> None:
        assert await sent(stream(fill), request, full) == b"begun|one|failed|"

    async with create_task_group() as tasks:
        tasks.start_soon(serve)
        await is_full.wait()
        assert request.end(ApiError(503, "too much"))
        await ended.wait()
        reads.set()
    assert not request.end(ApiError(503, "too late"))
