"""Downloads of repositories that go on when the request that started them has ended."""

import logging
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from anyio import CancelScope, Event
from anyio.abc import TaskGroup

from engine.api import ModelError, Progress

FetchRepository: TypeAlias = Callable[[str, Progress], Awaitable[None]]
"""Fetches a repository and reports how far it is. Raises ModelError."""

log = logging.getLogger("rootstock")


class Download:
    """One repository that is being fetched."""

    def __init__(self, repository: str) -> None:
        self.repository = repository
        self.done_bytes = 0
        self.total_bytes = 0  # 0 while that is not known
        self.error = ""  # why the repository was not fetched
        self.ended = Event()
        self._scope = CancelScope()

    async def run(self, fetch: FetchRepository) -> None:
        """Raises nothing: an error is logged, since its client may have left."""
        try:
            with self._scope:
                await fetch(self.repository, self._note)
            if self._scope.cancelled_caught:
                self.error = f"{self.repository} was not fetched: the server is stopping"
        except ModelError as error:
            self.error = str(error)
            log.warning("%s", error)
        except Exception as error:
            self.error = f"{self.repository} was not fetched: {error}"
            log.exception("cannot fetch %s", self.repository)
        finally:
            self.ended.set()

    def stop(self) -> None:
        self._scope.cancel()

    def _note(self, done_bytes: int, total_bytes: int) -> None:
        self.done_bytes, self.total_bytes = done_bytes, total_bytes


class Downloads:
    """The downloads of one daemon, which run in `tasks` until they end or are stopped."""

    def __init__(self, fetch: FetchRepository, tasks: TaskGroup) -> None:
        self._fetch = fetch
        self._tasks = tasks
        self._running: set[Download] = set()
        self._is_stopped = False

    def start(self, repository: str) -> Download:
        download = Download(repository)
        self._running.add(download)
        self._tasks.start_soon(self._run, download)
        if self._is_stopped:
            download.stop()
        return download

    def stop(self) -> None:
        """End all downloads, also those that start later. What has been fetched is resumed next
        time.
        """
        self._is_stopped = True
        for download in self._running:
            download.stop()

    async def _run(self, download: Download) -> None:
        try:
            await download.run(self._fetch)
        finally:
            self._running.remove(download)
