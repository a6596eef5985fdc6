"""What the log says when file descriptors run out."""

import asyncio
import errno
import os

import pytest

from server.transport.descriptors import AcceptErrors


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
