"""The models in the Hugging Face cache."""

from collections.abc import Sequence
from dataclasses import replace

from huggingface_hub import (
    CachedRepoInfo,
    DeleteCacheStrategy,
    HFCacheInfo,
    constants,
    scan_cache_dir,
)
from huggingface_hub.errors import CacheNotFound


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


def _scanned() -> HFCacheInfo:
    return scan_cache_dir(constants.HF_HUB_CACHE)
