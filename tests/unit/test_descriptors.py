"""How many file descriptors there are, and what the log says when they run out."""

import asyncio
import errno
import os
import resource
from pathlib import Path

import pytest

from server.http.connections import AcceptErrors, allowed_connections


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
