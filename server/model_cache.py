"""The models in the Hugging Face cache."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from anyio import Lock, current_time, to_thread
from huggingface_hub import (
    CachedRepoInfo,
    DeleteCacheStrategy,
    HFCacheInfo,
    constants,
    scan_cache_dir,
)
from huggingface_hub.errors import CacheNotFound

MAX_SCAN_AGE_SECONDS = 2.0
"""A change that no directory's time shows, as within the resolution of its clock, is seen then."""

Stamp = frozenset[tuple[str, int]]
"""Directories of the cache, with their times of modification in nanoseconds."""


class NotCached(Exception):
    """Models are not in the cache; `names` are theirs."""

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
        """The most recently used first."""
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
    """From a cache that has nothing else: a copy of the repository has revisions of equal names."""
    alone = replace(_scanned(), repos=frozenset({repo}))
    return alone.delete_revisions(*(revision.commit_hash for revision in repo.revisions))


def _stamp() -> Stamp:
    """Changes when a model or a revision of one is added or deleted, and reads no files."""
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
