"""The disk cache as the scheduler and the loop see it."""

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence

from engine.core.budget import StepBudget
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
from kvstore.ops import Parts
from kvstore.store import KVStore
from kvstore.tokens import Digest, block_digests, root_digest
from kvstore.types import Namespace

EVICTED_NODES = 4
"""Nodes next to be evicted that are written once less than 1 / FREE_SHARE of the blocks is free."""

FREE_SHARE = 16


class DiskCache:
    """A disk tier below the arena, with what is written to it and loaded from it.

    Steps are identified by their numbers. The order of a step's calls: `add_loads` while it is
    planned, `add_reads` when all else of it is planned, then `commit` or `fail`.
    """

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
        """Raises ValueError for a store without a prefix cache that hashes its blocks."""
        if (tree := store.tree) is None or not tree.hashes_blocks:
            raise ValueError("a disk cache needs a prefix cache that hashes its blocks")
        self._clock = clock
        self.shutdown_seconds = shutdown_seconds
        self._ends_at = -math.inf
        self._tier = tier
        self._store = store
        self._limit_bytes = limit_bytes
        entries = Entries(store.groups, part_bytes, store.block_size)
        self._writer = DiskWriter(tier, tree, entries, write_rules, clock)
        self._loader = DiskLoader(tier, store, entries, load_rules, clock, post)
        tree.observer = self._writer
        for group in store.groups:
            group.slots.on_attach = self._writer.attached

    @property
    def is_loading(self) -> bool:
        """Whether a load is under way, for which a sequence may be waiting."""
        return self._loader.is_loading

    @property
    def is_busy(self) -> bool:
        """Whether a load is under way, or a step could read what is to be written."""
        return self._loader.is_loading or self._writer.is_due

    @property
    def is_ending(self) -> bool:
        """Whether something is still to be written at the end, and there is time for it."""
        return self._writer.is_dirty and self._clock() < self._ends_at

    @property
    def namespaces(self) -> frozenset[Namespace]:
        """Those of which something is being read, from disk or from memory for the disk. The tree
        need not have them.
        """
        return self._loader.namespaces | self._writer.namespaces

    def is_filling(self, lease: Lease) -> bool:
        """Whether the lease is filled from disk now."""
        return self._loader.is_filling(lease)

    def block_hashes(self, namespace: Namespace, prompt: Sequence[int]) -> tuple[Digest, ...]:
        """The hashes of the prompt's blocks that could be loaded. On any thread."""
        return block_digests(namespace, prompt[:-1], self._store.block_size)

    def load(
        self,
        prompt: Prompt,
        attempt: LoadAttempt,
        spare_blocks: int,
        compute_seconds: ComputeSeconds,
    ) -> LoadOutcome:
        """Begin to load what is worth it of the prompt. See `LoadOutcome`."""
        return self._loader.begin(prompt, attempt, spare_blocks, compute_seconds)

    def add_loads(self, number: int, budget: StepBudget) -> bool:
        """Queue what the step fills in, within the time that its budget has for transfers. Returns
        whether it fills in anything.
        """
        is_filling = self._loader.plan(number, budget.transfer_seconds)
        if is_filling:
            budget.add_transfer(self._loader.fill_seconds(number))
        return is_filling

    def add_reads(self, number: int, budget: StepBudget) -> bool:
        """Queue what the step reads to be written to disk, within the time that its budget has for
        transfers. Returns whether it reads anything.
        """
        pool = self._store.pool
        if pool.n_free * FREE_SHARE < pool.n_blocks:
            self._writer.save_evictable(EVICTED_NODES)
        if not self._writer.is_due:
            return False
        reads = self._writer.plan(number, budget.transfer_seconds)
        for read in reads:
            self._store.read(read)
        return bool(reads)

    def observe(self, loading_steps: Collection[int], number: int, seconds: float) -> None:
        """Learn from a step that was held up for `seconds` by what it read and by the fills of the
        steps `loading_steps`. Where there were both, a byte filled counts as much as a byte read.
        """
        filled_bytes = sum(map(self._loader.filled_bytes, loading_steps))
        read_bytes = self._writer.read_bytes(number)
        byte_seconds = seconds / max(filled_bytes + read_bytes, 1)
        if filled_bytes:
            self._loader.took(filled_bytes, filled_bytes * byte_seconds)
        if read_bytes:
            self._writer.took(read_bytes, read_bytes * byte_seconds)

    def commit(self, number: int, contents: Sequence[Parts]) -> None:
        """A step has been carried out; `contents` are the results of its reads."""
        self._loader.commit(number)
        self._writer.commit(number, contents)

    def fail(self, number: int) -> None:
        """A step has not, or perhaps not, been carried out, and its ops have been revoked."""
        self._loader.fail(number)
        self._writer.fail(number)

    def wait_seconds(self) -> float | None:
        """How long the loop may sleep when it has nothing to do; None: until it is called."""
        waits = [self._loader.wait_seconds(), self._writer.wait_seconds()]
        return min((seconds for seconds in waits if seconds is not None), default=None)

    def roots(self) -> frozenset[Digest]:
        """The root hashes of all namespaces on disk. Looks at every entry."""
        return self._tier.roots()

    def forget(self, namespace: Namespace | None) -> None:
        """A namespace, or all, is being cleared in memory: end its loads."""
        self._loader.clear(namespace)

    def clear(self, namespace: Namespace | None) -> None:
        """Forget what is on disk of a namespace, or all. What memory has of it is written again
        when it is next used, and not before.
        """
        self._loader.clear(namespace)
        self._writer.clear(namespace)
        self._tier.clear(None if namespace is None else root_digest(namespace))

    def clear_root(self, root: Digest) -> None:
        """Clear a namespace that only the disk has. Its salt is unknown, so it is none of the
        tree's and none of `namespaces`.
        """
        self._tier.clear(root)

    def end(self) -> None:
        """No sequence is left, and none will come: begin to write what is dirty."""
        self._ends_at = self._clock() + self.shutdown_seconds
        self._loader.end()
        self._writer.end()

    def close(self) -> None:
        """Write what the tier has taken, as far as there is time, and close it."""
        self._loader.end()
        self._tier.flush(max(self._ends_at - self._clock(), 0.0))
        self._tier.close()

    def on_disk(self, hashes: Sequence[Digest]) -> int:
        """How many blocks of a run, given by its hashes, are on disk. On any thread.

        Counts from the first block to the last without a gap.
        """
        return bisect_left(hashes, True, key=self._is_missing)  # none is there without its parent

    def _is_missing(self, block_hash: Digest) -> bool:
        return not self._tier.known((block_hash,))

    def stats(self) -> DiskCacheStats:
        """On any thread."""
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
            failures={fault.value: count for fault, count in tier.counters.faults.items()},
            ended_threads=tier.ended_threads,
        )
