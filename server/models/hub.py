"""The models in the Hugging Face cache, and downloads into it."""

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from anyio import CancelScope, Event, Lock, current_time, to_thread
from anyio.abc import TaskGroup
from huggingface_hub import (
    CachedRepoInfo,
    DeleteCacheStrategy,
    HFCacheInfo,
    constants,
    scan_cache_dir,
)
from huggingface_hub.errors import CacheNotFound

from engine.api import ModelError, Progress

MAX_SCAN_AGE_SECONDS = 2.0
"""How old a scan may be. Some changes leave no trace in the times of directories."""

Stamp = frozenset[tuple[str, int]]
"""Directories of the cache, with their times of modification in nanoseconds."""

FetchRepository: TypeAlias = Callable[[str, Progress], Awaitable[None]]
"""Fetches a repository and reports how far it is. Raises ModelError."""

log = logging.getLogger("rootstock")


class NotCached(Exception):
    """The models with these names are not in the cache."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(f"{', '.join(names)}: not in the Hugging Face cache")
        self.names = names


def cached_models() -> list[CachedRepoInfo]:
    """The models, most recently used first. Data sets and spaces are left out."""
    try:
        repos = _scanned().repos
    except CacheNotFound:  # nothing has ever been fetched
        return []
    models = [repo for repo in repos if repo.repo_type == "model"]
    return sorted(models, key=lambda repo: repo.last_accessed, reverse=True)


class CachedNames:
    """The names of the cached models, for requests: scanned off the event loop, and kept until a
    model is fetched or deleted, MAX_SCAN_AGE_SECONDS at most. Belongs to one event loop.
    """

    def __init__(self, clock: Callable[[], float] = current_time) -> None:
        self._clock = clock
        self._scanning = Lock()
        self._names: tuple[str, ...] = ()
        self._stamp: Stamp | None = None  # of the cache before the last scan
        self._scanned_at = 0.0

    async def names(self) -> tuple[str, ...]:
        """The names, most recently used first."""
        async with self._scanning:
            stamp = await to_thread.run_sync(_stamp)
            age_seconds = self._clock() - self._scanned_at
            if stamp != self._stamp or age_seconds > MAX_SCAN_AGE_SECONDS:
                repositories = await to_thread.run_sync(cached_models)
                self._names = tuple(repository.repo_id for repository in repositories)
                self._stamp, self._scanned_at = stamp, self._clock()
            return self._names


def deletions(names: Sequence[str]) -> list[DeleteCacheStrategy]:
    """The strategies that delete the models with all revisions, and that know what this frees.

    Raises NotCached when one of them is not in the cache.
    """
    models = {repo.repo_id: repo for repo in cached_models()}
    if missing := [name for name in names if name not in models]:
        raise NotCached(missing)
    return [_deletion(models[name]) for name in dict.fromkeys(names)]


def _deletion(repo: CachedRepoInfo) -> DeleteCacheStrategy:
    """The strategy that deletes all revisions of one repository, and of no copy of it, whose
    revisions have the same names.
    """
    alone = replace(_scanned(), repos=frozenset({repo}))
    return alone.delete_revisions(*(revision.commit_hash for revision in repo.revisions))


def _stamp() -> Stamp:
    """The times of directories that change when a model or a revision is added or deleted."""
    cache = Path(constants.HF_HUB_CACHE)
    repositories = cache.glob("models--*")
    directories = [cache, *(home / part for home in repositories for part in ("snapshots", "refs"))]
    return frozenset(filter(None, map(_modified, directories)))


def _modified(directory: Path) -> tuple[str, int] | None:
    try:
        return str(directory), directory.stat().st_mtime_ns
    except OSError:  # it is not there, or has just been deleted
        return None


def _scanned() -> HFCacheInfo:
    return scan_cache_dir(constants.HF_HUB_CACHE)


class Download:
    """A repository that is being fetched."""

    def __init__(self, repository: str) -> None:
        self.repository = repository
        self.done_bytes = 0
        self.total_bytes = 0  # 0 while that is not known
        self.error = ""  # why the repository was not fetched
        self.ended = Event()
        self._scope = CancelScope()

    async def run(self, fetch: FetchRepository) -> None:
        """Fetch the repository. Raises nothing: an error is logged, as its client may have left."""
        try:
            with self._scope:
                await fetch(self.repository, self._note)
            if self._scope.cancelled_caught:
                self.error = f"{self.repository} was not fetched: the server is stopping"
        except ModelError as error:
            self.error = f"{self.repository} was not fetched: {error}"
            log.warning("%s", self.error)
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
    """The downloads of a daemon. They run in `tasks` until they end or are stopped."""

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
        """End all downloads, also those that start later. The next download resumes them."""
        self._is_stopped = True
        for download in self._running:
            download.stop()

    async def _run(self, download: Download) -> None:
        try:
            await download.run(self._fetch)
        finally:
            self._running.remove(download)
