"""Many streams at once: the paced engine, the readers, the figures."""

import asyncio
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.values.request import Request
from engine.values.settings import EngineConfig
from load_tests.client import TargetError
from load_tests.report import Percentiles
from load_tests.streams import crowd, paced
from load_tests.streams.command import WORD, Streaming, table
from load_tests.streams.listening import Heard, WordCounter, listen
from tests.hosting import hosted
from tests.unit.threaded_harness import Letters
from tools.events import events_of


def streaming(least: float) -> Streaming:
    return Streaming(2, 20.0, least, 40.0, 0.5, Percentiles(0.05, 0.06, 0.07))


async def test_a_paced_engine_says_the_word_once_for_each_token() -> None:
    config = EngineConfig(model="", kv_cache_bytes=2**23)
    build = partial(paced.load, 1e6, WORD, config, lambda line: None)
    engine = await asyncio.to_thread(hosted, build, Letters())
    asking = [Request(str(i), (5, 6, 7), 3 + i, ignore_eos=True) for i in range(2)]

    async def text(request: Request) -> str:
        return "".join([event.text async for event in events_of(engine, request)])

    assert await asyncio.gather(*map(text, asking)) == [3 * WORD, 4 * WORD]
    await engine.drain(0.0)


@given(st.lists(st.sampled_from(["the", "t", "h", "e", " "])), st.integers(1, 5))
def test_words_are_counted_however_the_text_is_cut(pieces: list[str], size: int) -> None:
    text = "".join(pieces).encode()
    counter = WordCounter("the")
    cut = [text[i : i + size] for i in range(0, len(text), size)]
    assert sum(map(counter.count, cut)) == text.count(b"the")


def test_only_what_came_in_the_time_counts() -> None:
    heard = Heard([(0.5, 1), (1.0, 1), (1.25, 2), (2.0, 1)])
    assert heard.words(1.0, 2.0) == 3
    assert heard.gap_seconds(1.0, 2.0) == [0.25]


async def answering(answer: bytes) -> Heard:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        writer.write(answer)
        await writer.drain()
        writer.close()

    heard = Heard()
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        await listen(port, {"stream": True}, "the", heard)
    return heard


async def test_a_stream_is_heard_to_its_end() -> None:
    heard = await answering(b"HTTP/1.1 200 OK\r\n\r\ndata: thethe\n\n")
    assert [count for _, count in heard.reads] == [2]


@pytest.mark.parametrize("answer", [b"HTTP/1.1 503 Busy\r\n\r\nno room", b"nothing"])
async def test_a_stream_that_is_refused_is_an_error(answer: bytes) -> None:
    with pytest.raises(TargetError):
        await answering(answer)


def test_a_daemon_that_falls_behind_is_told_from_one_that_does_not() -> None:
    assert streaming(least=19.5).keeps_pace
    assert not streaming(least=18.0).keeps_pace


def test_the_table_has_a_cell_for_every_column() -> None:
    found = table((streaming(20.0),))
    assert [len(row) for row in found.rows] == [len(found.columns)]


async def test_a_crowd_begins_anew_when_its_connections_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(crowd, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(crowd, "SETTLE_SECONDS", 0.01)
    came = list[tuple[str, bytes]]()
    enough = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address, _ = writer.get_extra_info("peername")
        came.append((address, (await reader.readuntil(b"\r\n")).split()[0]))
        if len(came) == 6:
            enough.set()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with crowd._tasks([crowd._slow_reader(port, 0), crowd._quiet(port, 1)]):
            await asyncio.wait_for(enough.wait(), 10)
    assert set(came) == {("127.0.1.1", b"POST"), ("127.0.1.2", b"GET")}


def test_the_table_of_a_crowd() -> None:
    phase = crowd.Phase("beside the crowd", 2000, Percentiles(0.05, 0.06, 0.07), 0.17, 232 << 20)
    assert crowd.table([phase]).rows == (
        ("beside the crowd", "2000", "50.0", "60.0", "70.0", "0.17", "232"),
    )
