"""Opens the configured disk cache for one model."""

import math

from engine.disk_cache.archive import ArchiveRules
from engine.disk_cache.cache import TieredCache
from engine.disk_cache.recalls import RecallRules
from engine.inbox import Inbox
from engine.mlx_backend.parts import Backend
from engine.types import DiskCacheConfig
from kvstore.store import KVStore
from kvstore.tier.tier import DiskTier
from kvstore.tier.types import TierLimits


def open_disk_cache(
    config: DiskCacheConfig, backend: Backend, store: KVStore, inbox: Inbox
) -> TieredCache:
    """Raises TierError, in words, when the folder cannot be used."""
    daily_bytes = math.inf if config.daily_bytes is None else config.daily_bytes
    return TieredCache(
        DiskTier.open(
            config.directory,
            f"{backend.card.fingerprint} {backend.kv_format}",
            TierLimits(max_bytes=config.max_bytes, daily_bytes=daily_bytes),
        ),
        store,
        backend.part_bytes,
        config.max_bytes,
        inbox.post,
        ArchiveRules(writes=config.write, salted=config.salted),
        RecallRules(salted=config.salted),
        config.shutdown_seconds,
    )
