"""Many streams of a paced daemon, read at little cost: bare sockets, and no answer is parsed."""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from load_tests.client import TargetError
from load_tests.processes import Process, cpu_seconds, free_port, running

READ_BYTES = 2**16
WORD = "the"
"""The text of every token of the paced daemon."""


@dataclass(slots=True)
class Heard:
    """The words of one stream: when they came, on the clock of `time.perf_counter`, and how many
    at a time.
    """

    reads: list[tuple[float, int]] = field(default_factory=list)

    def words(self, since: float, until: float) -> int:
        """How many came in that time."""
        return sum(count for moment, count in self.reads if since <= moment < until)

    def gap_seconds(self, since: float, until: float) -> list[float]:
        """Between one read that had words and the next."""
        moments = [moment for moment, _ in self.reads if since <= moment < until]
        return [b - a for a, b in pairwise(moments)]


class WordCounter:
    """Counts a word in a text that comes in pieces, which may cut it."""

    def __init__(self, word: str) -> None:
        self._word = word.encode()
        self._rest = b""

    def count(self, piece: bytes) -> int:
        """How many words the piece completes."""
        text = self._rest + piece
        found = text.count(self._word)
        self._rest = text[text.rfind(self._word) + len(self._word) :] if found else text
        self._rest = self._rest[1 - len(self._word) :]
        return found


@dataclass(frozen=True, slots=True)
class Span:
    """A time on the clock of `time.perf_counter`, and a process's processor time in it."""

    since: float
    until: float
    cpu_seconds: float

    @property
    def seconds(self) -> float:
        """How long it was."""
        return self.until - self.since


async def measured(process: Process, seconds: float) -> Span:
    """Wait that long; the processor time of all threads of the process meanwhile."""
    since, before = time.perf_counter(), cpu_seconds(process)
    await asyncio.sleep(seconds)
    return Span(since, time.perf_counter(), cpu_seconds(process) - before)


@contextmanager
def paced_daemon(
    rows: int, tokens_per_second: float, log: Path, directory: Path | None = None
) -> Iterator[tuple[Process, int]]:
    """Run `load_tests.streams.paced`, of the checkout in `directory` if there is one. Yields the
    process and its port. Raises TargetError if it does not start.
    """
    port = free_port()
    arguments = (str(port), str(rows), str(tokens_per_second), WORD)
    command = (sys.executable, "-m", "load_tests.streams.paced", *arguments)
    health_url = f"http://127.0.0.1:{port}/health"
    with running(command, health_url, log, directory=directory) as process:
        yield process, port


@asynccontextmanager
async def background(
    coroutines: Sequence[Coroutine[Any, Any, None]],
) -> AsyncIterator[list["asyncio.Task[None]"]]:
    """Run them while the block runs. Raises what one of them has raised until then."""
    tasks = [asyncio.create_task(each) for each in coroutines]
    try:
        yield tasks
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def listen(port: int, prompt: str, max_tokens: int, heard: Heard) -> None:
    """Request one stream on the loopback and note when words come, until it ends.

    Raises TargetError when it is refused.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(chat_request(prompt, max_tokens))
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200 "):
            raise TargetError((head + await reader.read(500)).decode(errors="replace"))
        counter = WordCounter(WORD)
        while piece := await reader.read(READ_BYTES):
            if count := counter.count(piece):
                heard.reads.append((time.perf_counter(), count))
    except (OSError, EOFError) as error:
        raise TargetError(f"a stream broke off: {error!r}") from error
    finally:
        writer.close()


def chat_request(prompt: str, max_tokens: int) -> bytes:
    """A request for a stream of that many tokens, on a connection that is closed after it."""
    body = {
        "model": "rootstock-demo",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
    }
    content = json.dumps(body).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\n"
        "Host: 127.0.0.1\r\n"
        "Content-Type: application/json\r\n"
        "Connection: close\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content
