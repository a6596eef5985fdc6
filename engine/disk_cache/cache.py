"""What the scheduler and the loop know of the disk: a tier with its policy, or none."""

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from engine.disk_cache.archive import Archive, ArchiveRules
from engine.disk_cache.entries import Entries
from engine.disk_cache.names import BlockNames
from engine.disk_cache.recalls import (
    ComputeSeconds,
    Post,
    Prompt,
    Recalled,
    RecallRules,
    Recalls,
    Wish,
)
from engine.disk_cache.tier import Tier
from engine.types.statistics import DiskCacheStats
from kvstore.actions import Parts, ReadBlock, StorageOp
from kvstore.digest import Digest, block_digests, root_digest
from kvstore.lease import Lease
from kvstore.store import KVStore
from kvstore.types import BlockId, Namespace


class DiskCache(Protocol):
    """A tier below the arena. Steps are told apart by their numbers."""

    @property
    def is_loading(self) -> bool:
        """Whether somebody may be waiting for it."""
        ...

    def loads(self, lease: Lease) -> bool:
        """Whether it is filled from disk now."""
        ...

    @property
    def is_busy(self) -> bool:
        """Whether a load is under way, or a step could read what is to be written."""
        ...

    @property
    def is_ending(self) -> bool:
        """Whether something is still to be written at the end, and there is time for it."""
        ...

    def names(self, namespace: Namespace, prompt: Sequence[int]) -> tuple[Digest, ...]:
        """Those of a prompt's blocks that could be recalled. On any thread."""
        ...

    def recall(
        self, prompt: Prompt, wish: Wish, spare_blocks: int, compute_seconds: ComputeSeconds
    ) -> Recalled:
        """Whether more of the prompt comes from now on."""
        ...

    def fills(self, number: int, seconds: float) -> Sequence[StorageOp]:
        """What a step is to fill in, in so much time."""
        ...

    def fill_seconds(self, number: int) -> float:
        """How long that is predicted to take."""
        ...

    def reads(self, number: int, seconds: float) -> Sequence[ReadBlock]:
        """What a step is to read in so much time, when all else has been planned of it."""
        ...

    def took(self, filled: Collection[int], read: int, seconds: float) -> None:
        """What these steps have filled in, and that one has read, has held others up so long."""
        ...

    def commit(self, number: int, contents: Sequence[Parts]) -> None:
        """A step has been carried out."""
        ...

    def fail(self, number: int) -> None:
        """A step has not, or perhaps not, been carried out, and its ops have been revoked."""
        ...

    def wait_seconds(self) -> float | None:
        """How long the loop may sleep when it has nothing to do; None: until it is called."""
        ...

    @property
    def namespaces(self) -> frozenset[Namespace]:
        """Those of which something is being read, from disk or from memory for the disk. The tree
        need not have them.
        """
        ...

    def roots(self) -> frozenset[Digest]:
        """Of all namespaces of which the disk has something. Looks at every entry."""
        ...

    def forget(self, namespace: Namespace | None) -> None:
        """A namespace, or all, is being cleared in memory: nothing of it is to come there."""
        ...

    def clear(self, namespace: Namespace | None) -> None:
        """Forget what is on disk of a namespace, or all. What memory has of it is written again
        when somebody goes on with it, and not before.
        """
        ...

    def clear_root(self, root: Digest) -> None:
        """The same for a namespace that only the disk has: nobody can tell its salt, and so it is
        none of the tree's and none of `namespaces`.
        """
        ...

    def end(self) -> None:
        """No sequence is left, and none will come: what is to be written is due."""
        ...

    def close(self) -> None:
        """Let go of the disk."""
        ...

    def on_disk(self, blocks: Sequence[BlockId]) -> int:
        """How many blocks of a run in the tree, from the first on, could be read. On any thread."""
        ...

    def stats(self) -> DiskCacheStats | None:
        """On any thread."""
        ...


class NoDiskCache:
    """What is lost in memory is lost."""

    is_loading = False
    is_busy = False
    is_ending = False
    namespaces = frozenset[Namespace]()

    def loads(self, lease: Lease) -> bool:
        return False

    def names(self, namespace: Namespace, prompt: Sequence[int]) -> tuple[Digest, ...]:
        return ()

    def recall(
        self, prompt: Prompt, wish: Wish, spare_blocks: int, compute_seconds: ComputeSeconds
    ) -> Recalled:
        return Recalled.NOTHING

    def fills(self, number: int, seconds: float) -> Sequence[StorageOp]:
        return ()

    def fill_seconds(self, number: int) -> float:
        return 0.0

    def reads(self, number: int, seconds: float) -> Sequence[ReadBlock]:
        return ()

    def took(self, filled: Collection[int], read: int, seconds: float) -> None:
        """Nothing was moved."""

    def commit(self, number: int, contents: Sequence[Parts]) -> None:
        """Nothing was read."""

    def fail(self, number: int) -> None:
        """Nothing was read."""

    def wait_seconds(self) -> float | None:
        return None

    def roots(self) -> frozenset[Digest]:
        return frozenset()

    def forget(self, namespace: Namespace | None) -> None:
        """Nothing was to come."""

    def clear(self, namespace: Namespace | None) -> None:
        """There is nothing."""

    def clear_root(self, root: Digest) -> None:
        """There is nothing."""

    def end(self) -> None:
        """Nothing is written."""

    def close(self) -> None:
        """There is no disk."""

    def on_disk(self, blocks: Sequence[BlockId]) -> int:
        return 0

    def stats(self) -> DiskCacheStats | None:
        return None


NO_DISK_CACHE = NoDiskCache()

EVICTED_NODES = 4
"""So many of the next to be evicted are written when less than a share of the blocks is free."""

FREE_SHARE = 16


class TieredCache:
    """A tier, and what is written to it and read from it."""

    def __init__(
        self,
        tier: Tier,
        store: KVStore,
        part_bytes: Sequence[int],
        limit_bytes: int,
        post: Post,
        archive: ArchiveRules,
        recalls: RecallRules,
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
        self._names = BlockNames(store.block_size)
        self._archive = Archive(tier, store.index, self._names, entries, archive, clock)
        self._recalls = Recalls(tier, store, entries, recalls, clock, post)
        store.index.observers.add(self._names)
        store.index.observers.add(self._archive)
        store.pool.when_freed(self._names.forget)
        for group in store.groups:
            group.when_attached(self._archive.attached)

    @property
    def is_loading(self) -> bool:
        return self._recalls.is_loading

    @property
    def is_ending(self) -> bool:
        return self._archive.is_dirty and self._clock() < self._ends_at

    def loads(self, lease: Lease) -> bool:
        return self._recalls.fills(lease)

    @property
    def is_busy(self) -> bool:
        return self._recalls.is_loading or self._archive.is_due

    def names(self, namespace: Namespace, prompt: Sequence[int]) -> tuple[Digest, ...]:
        return block_digests(namespace, prompt[:-1], self._store.block_size)

    def recall(
        self, prompt: Prompt, wish: Wish, spare_blocks: int, compute_seconds: ComputeSeconds
    ) -> Recalled:
        return self._recalls.begin(prompt, wish, spare_blocks, compute_seconds)

    def fills(self, number: int, seconds: float) -> Sequence[StorageOp]:
        return self._recalls.plan(number, seconds)

    def fill_seconds(self, number: int) -> float:
        return self._recalls.fill_seconds(number)

    def reads(self, number: int, seconds: float) -> Sequence[ReadBlock]:
        pool = self._store.pool
        if pool.n_free * FREE_SHARE < pool.n_blocks:
            self._archive.save_evictable(EVICTED_NODES)
        return self._archive.plan(number, seconds)

    def took(self, filled: Collection[int], read: int, seconds: float) -> None:
        """Where there was both, a byte of either has taken as long."""
        filled_bytes = sum(map(self._recalls.filled_bytes, filled))
        read_bytes = self._archive.read_bytes(read)
        byte_seconds = seconds / max(filled_bytes + read_bytes, 1)
        if filled_bytes:
            self._recalls.took(filled_bytes, filled_bytes * byte_seconds)
        if read_bytes:
            self._archive.took(read_bytes, read_bytes * byte_seconds)

    def commit(self, number: int, contents: Sequence[Parts]) -> None:
        self._recalls.commit(number)
        self._archive.commit(number, contents)

    def fail(self, number: int) -> None:
        self._recalls.fail(number)
        self._archive.fail(number)

    def wait_seconds(self) -> float | None:
        waits = [self._recalls.wait_seconds(), self._archive.wait_seconds()]
        return min((seconds for seconds in waits if seconds is not None), default=None)

    @property
    def namespaces(self) -> frozenset[Namespace]:
        return self._recalls.namespaces | self._archive.namespaces

    def roots(self) -> frozenset[Digest]:
        return self._tier.roots()

    def forget(self, namespace: Namespace | None) -> None:
        self._recalls.clear(namespace)

    def clear(self, namespace: Namespace | None) -> None:
        self._recalls.clear(namespace)
        self._archive.clear(namespace)
        self._tier.clear(None if namespace is None else root_digest(namespace))

    def clear_root(self, root: Digest) -> None:
        self._tier.clear(root)

    def end(self) -> None:
        self._ends_at = self._clock() + self._shutdown_seconds
        self._recalls.end()
        self._archive.end()

    def close(self) -> None:
        self._recalls.end()
        self._tier.flush(max(self._ends_at - self._clock(), 0.0))
        self._tier.close()

    def on_disk(self, blocks: Sequence[BlockId]) -> int:
        return bisect_left(blocks, True, key=self._is_missing)  # none is there without its parent

    def _is_missing(self, block: BlockId) -> bool:
        name = self._names.get(block)
        return name is None or not self._tier.known((name,))

    def stats(self) -> DiskCacheStats:
        tier, loads = self._tier.stats(), self._recalls.counters
        return DiskCacheStats(
            entries=tier.entries,
            used_bytes=tier.used_bytes,
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
