"""File descriptors: the limit that connections need, and a log line where they run out."""

import asyncio
import errno
import logging
import resource
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

RESERVED_DESCRIPTORS = 128  # the model's files, the log, and connections that are just closing
OUT_OF_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
REPORT_SECONDS = 60.0
MACOS_OPEN_MAX = 10_240  # what every macOS allows a process
SYSCTL_SECONDS = 5.0

log = logging.getLogger("rootstock.connections")


def allowed_connections(wanted: int) -> int:
    """How many connections the limit of open files allows, raised as far as it can be.

    At most `wanted`. The soft limit is 256 on macOS, and 1,024 on most Linux systems.
    """
    limit = _raised(wanted + RESERVED_DESCRIPTORS)
    allowed = min(wanted, max(limit - RESERVED_DESCRIPTORS, limit // 2))
    if allowed < wanted:
        log.warning("%d connections at most: the limit of open files is %d", allowed, limit)
    return allowed


def _raised(needed: int) -> int:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft != unlimited and soft < needed:
        allowed = needed if hard == unlimited else min(needed, hard)
        for limit in _possible_limits(allowed):
            if limit <= soft:
                continue
            with suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
                break
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return needed if soft == unlimited else soft


def _possible_limits(allowed: int) -> Iterator[int]:
    """The soft limits to try. macOS refuses more than kern.maxfilesperproc, which depends on the
    machine's memory, although its hard limit is infinite.
    """
    yield allowed
    with suppress(OSError, ValueError, subprocess.SubprocessError):
        question = ["sysctl", "-n", "kern.maxfilesperproc"]
        answer = subprocess.run(question, capture_output=True, timeout=SYSCTL_SECONDS, check=True)
        yield min(allowed, int(answer.stdout))
    yield min(allowed, MACOS_OPEN_MAX)


class AcceptErrors:
    """The event loop's exception handler. It says once a minute, in one line, that no connection
    can be accepted; asyncio would write a traceback for each attempt.
    """

    def __init__(self) -> None:
        self._next_report_seconds = 0.0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in OUT_OF_RESOURCES:
            loop.default_exception_handler(context)
        elif loop.time() >= self._next_report_seconds:
            self._next_report_seconds = loop.time() + REPORT_SECONDS
            log.error("cannot accept connections: %s", error.strerror)
