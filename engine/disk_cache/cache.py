"""The disk cache as the scheduler and the loop see it, with and without a disk."""

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence

from engine.disk_cache.block_hashes import BlockHashes
from engine.disk_cache.entries import Entries
from engine.disk_cache.loader import (
    ComputeSeconds,
    DiskLoader,
    LoadAttempt,
    LoadOutcome,
    LoadRules,
    Post,
    Prompt,
)
from engine.disk_cache.tier import Tier
from engine.disk_cache.writer import DiskWriter, WriteRules
from engine.values.stats import DiskCacheStats
from kvstore.lease import Lease
from kvstore.ops import Parts, ReadBlock, StorageOp
from kvstore.store import KVStore
from kvstore.tokens import Digest, block_digests, root_digest
from kvstore.types import BlockId, Namespace


class DiskCache:
    """What an engine without a disk cache runs with: nothing is found, and nothing is kept.

    `TieredCache` overrides all of it. Steps are identified by their numbers.
    """

    @property
    def is_loading(self) -> bool:
        """Whether a load is under way, for which a sequence may be waiting."""
        return False

    @property
    def is_busy(self) -> bool:
        """Whether a load is under way, or a step could read what is to be written."""
        return False

    @property
    def is_ending(self) -> bool:
        """Whether something is still to be written at the end, and there is time for it."""
        return False

    @property
    def namespaces(self) -> frozenset[Namespace]:
        """Those of which something is being read, from disk or from memory for the disk. The tree
        need not have them.
        """
        return frozenset()

    def is_filling(self, lease: Lease) -> bool:
        """Whether the lease is filled from disk now."""
        return False

    def block_hashes(self, namespace: Namespace, prompt: Sequence[int]) -> tuple[Digest, ...]:
        """Those of the prompt's blocks that could be loaded. On any thread."""
        return ()

    def load(
        self,
        prompt: Prompt,
        attempt: LoadAttempt,
        spare_blocks: int,
        compute_seconds: ComputeSeconds,
    ) -> LoadOutcome:
        """Begin to load what is worth it of the prompt. See `LoadOutcome`."""
        return LoadOutcome.NOTHING

    def fills(self, number: int, seconds: float) -> Sequence[StorageOp]:
        """What a step is to fill in, in so much time."""
        return ()

    def fill_seconds(self, number: int) -> float:
        """How long the step's fills are predicted to take."""
        return 0.0

    def reads(self, number: int, seconds: float) -> Sequence[ReadBlock]:
        """What a step is to read in so much time, when all else of it has been planned."""
        return ()

    def took(self, filled: Collection[int], read: int, seconds: float) -> None:
        """The fills of steps `filled` and the reads of step `read` have held others up so long."""

    def commit(self, number: int, contents: Sequence[Parts]) -> None:
        """A step has been carried out; `contents` is what it has read."""

    def fail(self, number: int) -> None:
        """A step has not, or perhaps not, been carried out, and its ops have been revoked."""

    def wait_seconds(self) -> float | None:
        """How long the loop may sleep when it has nothing to do; None: until it is called."""
        return None

    def roots(self) -> frozenset[Digest]:
        """The root hashes of all namespaces on disk. Looks at every entry."""
        return frozenset()

    def forget(self, namespace: Namespace | None) -> None:
        """A namespace, or all, is being cleared in memory: end its loads."""

    def clear(self, namespace: Namespace | None) -> None:
        """Forget what is on disk of a namespace, or all. What memory has of it is written again
        when it is next used, and not before.
        """

    def clear_root(self, root: Digest) -> None:
        """Clear a namespace that only the disk has. Its salt is unknown, so it is none of the
        tree's and none of `namespaces`.
        """

    def end(self) -> None:
        """No sequence is left, and none will come: write what is dirty."""

    def close(self) -> None:
        """Let go of the disk."""

    def on_disk(self, blocks: Sequence[BlockId]) -> int:
        """How many blocks of a run in the tree, from the first on, could be read. On any thread."""
        return 0

    def stats(self) -> DiskCacheStats | None:
        """On any thread."""
        return None


NO_DISK_CACHE = DiskCache()

EVICTED_NODES = 4
"""So many of the next to be evicted are written when less than a share of the blocks is free."""

FREE_SHARE = 16


class TieredCache(DiskCache):
    """A disk tier below the arena, with what is written to it and loaded from it."""

    def __init__(
        self,
        tier: Tier,
        store: KVStore,
        part_bytes: Sequence[int],
        limit_bytes: int,
        post: Post,
        write_rules: WriteRules,
        load_rules: LoadRules,
        shutdown_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._shutdown_seconds = shutdown_seconds
        self._ends_at = -math.inf
        self._tier = tier
        self._store = store
        self._limit_bytes = limit_bytes
        entries = Entries(store.groups, part_bytes, store.block_size)
        self._hashes = BlockHashes(store.block_size)
        self._writer = DiskWriter(tier, store.index, self._hashes, entries, write_rules, clock)
        self._loader = DiskLoader(tier, store, entries, load_rules, clock, post)
        store.index.observers.add(self._hashes)
        store.index.observers.add(self._writer)
        store.pool.when_freed(self._hashes.forget)
        for group in store.groups:
            group.when_attached(self._writer.attached)

    @property
    def is_loading(self) -> bool:
        return self._loader.is_loading

    @property
    def is_busy(self) -> bool:
        return self._loader.is_loading or self._writer.is_due

    @property
    def is_ending(self) -> bool:
        return self._writer.is_dirty and self._clock() < self._ends_at

    @property
    def namespaces(self) -> frozenset[Namespace]:
        return self._loader.namespaces | self._writer.namespaces

    def is_filling(self, lease: Lease) -> bool:
        return self._loader.is_filling(lease)

    def block_hashes(self, namespace: Namespace, prompt: Sequence[int]) -> tuple[Digest, ...]:
        return block_digests(namespace, prompt[:-1], self._store.block_size)

    def load(
        self,
        prompt: Prompt,
        attempt: LoadAttempt,
        spare_blocks: int,
        compute_seconds: ComputeSeconds,
    ) -> LoadOutcome:
        return self._loader.begin(prompt, attempt, spare_blocks, compute_seconds)

    def fills(self, number: int, seconds: float) -> Sequence[StorageOp]:
        return self._loader.plan(number, seconds)

    def fill_seconds(self, number: int) -> float:
        return self._loader.fill_seconds(number)

    def reads(self, number: int, seconds: float) -> Sequence[ReadBlock]:
        pool = self._store.pool
        if pool.n_free * FREE_SHARE < pool.n_blocks:
            self._writer.save_evictable(EVICTED_NODES)
        return self._writer.plan(number, seconds)

    def took(self, filled: Collection[int], read: int, seconds: float) -> None:
        """Where there were both, a byte filled is taken to cost as much as a byte read."""
        filled_bytes = sum(map(self._loader.filled_bytes, filled))
        read_bytes = self._writer.read_bytes(read)
        byte_seconds = seconds / max(filled_bytes + read_bytes, 1)
        if filled_bytes:
            self._loader.took(filled_bytes, filled_bytes * byte_seconds)
        if read_bytes:
            self._writer.took(read_bytes, read_bytes * byte_seconds)

    def commit(self, number: int, contents: Sequence[Parts]) -> None:
        self._loader.commit(number)
        self._writer.commit(number, contents)

    def fail(self, number: int) -> None:
        self._loader.fail(number)
        self._writer.fail(number)

    def wait_seconds(self) -> float | None:
        waits = [self._loader.wait_seconds(), self._writer.wait_seconds()]
        return min((seconds for seconds in waits if seconds is not None), default=None)

    def roots(self) -> frozenset[Digest]:
        return self._tier.roots()

    def forget(self, namespace: Namespace | None) -> None:
        self._loader.clear(namespace)

    def clear(self, namespace: Namespace | None) -> None:
        self._loader.clear(namespace)
        self._writer.clear(namespace)
        self._tier.clear(None if namespace is None else root_digest(namespace))

    def clear_root(self, root: Digest) -> None:
        self._tier.clear(root)

    def end(self) -> None:
        self._ends_at = self._clock() + self._shutdown_seconds
        self._loader.end()
        self._writer.end()

    def close(self) -> None:
        self._loader.end()
        self._tier.flush(max(self._ends_at - self._clock(), 0.0))
        self._tier.close()

    def on_disk(self, blocks: Sequence[BlockId]) -> int:
        return bisect_left(blocks, True, key=self._is_missing)  # none is there without its parent

    def _is_missing(self, block: BlockId) -> bool:
        block_hash = self._hashes.get(block)
        return block_hash is None or not self._tier.known((block_hash,))

    def stats(self) -> DiskCacheStats:
        tier, loads = self._tier.stats(), self._loader.counters
        return DiskCacheStats(
            entries=tier.entries,
            used_bytes=tier.used_bytes,
            shared_bytes=tier.shared_bytes,
            limit_bytes=self._limit_bytes,
            buffered_bytes=tier.buffered_bytes,
            read_bytes=tier.counters.read_bytes,
            written_bytes=tier.counters.written_bytes,
            hits=loads.loads,
            loaded_tokens=loads.loaded_tokens,
            load_seconds=loads.load_seconds,
            failures={fault.value: count for fault, count in tier.counters.faults},
            ended_threads=tier.ended_threads,
        )
