"""Fetches a repository from Hugging Face in a process of its own.

A download cannot be interrupted in a thread: threads of its own wait for the network, and the
interpreter waits for them at exit. A process can be killed, and what it has written is resumed.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from pydantic import TypeAdapter

from engine.api import ModelError
from engine.child_process import start_child

Progress = Callable[[int, int], None]
"""Called with the bytes that are there and with those that there will be, as far as is known."""


@dataclass(frozen=True, slots=True)
class FetchReport:
    """A line that the process sends: how far it is, or, as its last line, how it ended."""

    done_bytes: int = 0
    total_bytes: int = 0
    has_ended: bool = False
    error: str = ""  # why the repository was not fetched


REPORT = TypeAdapter(FetchReport)


async def fetch_repository(repository: str, progress: Progress) -> None:
    """Fetch a checkpoint into the Hugging Face cache, if it is not there yet.

    `progress` is called on the event loop. Raises ModelError. Cancelled, it ends the process.
    """
    connection, process = await asyncio.to_thread(
        start_child, "engine.mlx_backend.fetched", repository
    )
    try:
        reader, writer = await asyncio.open_connection(sock=connection)
        try:
            last = await _last_report(reader, progress)
        finally:
            writer.close()
    finally:
        process.kill()  # which does nothing to one that has ended
        process.wait()
    if last is None:
        raise ModelError(f"{repository} was not fetched: the download's process has ended")
    if last.error:
        raise ModelError(last.error)


async def _last_report(reader: asyncio.StreamReader, progress: Progress) -> FetchReport | None:
    async for line in reader:
        report = REPORT.validate_json(line)
        if report.has_ended:
            return report
        progress(report.done_bytes, report.total_bytes)
    return None
