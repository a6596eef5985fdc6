"""Streams of server-sent events as servers and proxies really send them."""

from collections.abc import AsyncIterator

import pytest

from load_tests.sse import event_data


async def parse(text: str) -> list[str]:
    async def lines() -> AsyncIterator[str]:
        for line in text.splitlines():
            yield line

    return [data async for data in event_data(lines())]


@pytest.mark.parametrize(
    ("stream", "data"),
    [
        ("data: a\n\ndata: b\n\n", ["a", "b"]),
        ("data:a\n\n", ["a"]),
        ("data:  a \n\n", [" a "]),
        ("data: a\r\n\r\ndata: b\r\n\r\n", ["a", "b"]),
        (": keepalive 3/7\n\ndata: a\n\n", ["a"]),
        ("data: a\n: keepalive\ndata: b\n\n", ["a\nb"]),
        ("event: message_start\nid: 3\nretry: 10\ndata: a\n\n", ["a"]),
        ('data: {"a": "b: c"}\n\n', ['{"a": "b: c"}']),
        ("data\n\n", [""]),
        ("\n\n\ndata: a\n\n\n", ["a"]),
        ("data: a\n\ndata: cut off", ["a"]),
        ("", []),
    ],
)
async def test_event_data(stream: str, data: list[str]) -> None:
    assert await parse(stream) == data
