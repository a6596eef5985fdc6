"""The disk cache as the scheduler and the loop see it, and how it is opened for a model."""

import math
import time
from collections.abc import Callable, Collection, Sequence

from engine.core.budget import StepBudget
from engine.core.step import Backend
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
from engine.disk_cache.transfers import LoadLimits
from engine.disk_cache.writer import DiskWriter, WriteRules
from engine.values.settings import DiskCacheConfig
from engine.values.stats import DiskCacheStats
from kvstore.disk.space import holding, longest_path
from kvstore.disk.store import DiskStore
from kvstore.disk.types import MIB, DiskError, DiskLimits
from kvstore.lease import Lease
from kvstore.ops import Parts
from kvstore.pool import blocks_for
from kvstore.store import KVStore
from kvstore.tokens import TOKEN_BYTES, Digest, PackedDigests, block_digests, root_digest
from kvstore.types import Namespace

EVICTED_NODES = 4
"""Nodes next to be evicted that are written once less than 1 / FREE_SHARE of the blocks is free."""

COLDEST_NODES = 64
"""Nodes that are written before memory is given back."""

FREE_SHARE = 16

BUFFER_BYTES = 64 * MIB

HELD_PART, AHEAD_PART = 4, 64
"""Shares of the arena: blocks pinned by all loads together, unless one alone is larger, and
bytes read ahead for them.
"""

LEAST_AHEAD_BYTES = 16 * MIB
"""Two runs for each of two readers."""


class DiskCache:
    """The disk store of an engine, with its pending writes and loads.

    Steps are identified by their numbers. The order of a step's calls: `add_loads` while it is
    planned, `add_reads` when all else of it is planned, then `commit` or `fail`.
    """

    def __init__(
        self,
        disk: DiskStore,
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
        self._disk = disk
        self._store = store
        self._limit_bytes = limit_bytes
        entries = Entries(store.groups, part_bytes, store.block_size)
        self._writer = DiskWriter(disk, tree, entries, write_rules, clock)
        self._loader = DiskLoader(disk, store, entries, load_rules, clock, post)
        for group in store.groups:
            group.slots.on_attach = tree.attached

    @property
    def is_loading(self) -> bool:
        """Whether a load is under way, for which a sequence may be waiting."""
        return self._loader.is_loading

    @property
    def is_busy(self) -> bool:
        """Whether a load is in progress, or a step could read blocks to be written."""
        return self._loader.is_loading or self._writer.is_due

    @property
    def is_ending(self) -> bool:
        """Whether something is still to be written at the end, and there is time for it."""
        return self._writer.is_dirty and self._clock() < self._ends_at

    @property
    def namespaces(self) -> frozenset[Namespace]:
        """The namespaces with reads in progress, from disk or from memory for the disk. The tree
        may lack them.
        """
        return self._loader.namespaces | self._writer.namespaces

    def is_filling(self, lease: Lease) -> bool:
        """Whether the lease is filled from disk now."""
        return self._loader.is_filling(lease)

    def block_hashes(self, namespace: Namespace, packed: bytes) -> PackedDigests:
        """The hashes of the blocks of a packed prompt that could be loaded. On any thread."""
        return block_digests(namespace, packed[:-TOKEN_BYTES], self._store.block_size)

    def load(
        self,
        prompt: Prompt,
        attempt: LoadAttempt,
        spare_blocks: int,
        compute_seconds: ComputeSeconds,
    ) -> LoadOutcome:
        """Begin to load the prompt from disk as far as that pays. See `LoadOutcome`."""
        return self._loader.begin(prompt, attempt, spare_blocks, compute_seconds)

    def add_loads(self, number: int, budget: StepBudget) -> bool:
        """Queue the fills of the step within the transfer time of its budget. Returns whether there
        are any.
        """
        is_filling = self._loader.plan(number, budget.transfer_seconds)
        if is_filling:
            budget.add_transfer(self._loader.fill_seconds(number))
        return is_filling

    def add_reads(self, number: int, budget: StepBudget) -> bool:
        """Queue the reads of the step, for writing to disk, within the transfer time of its budget.
        Returns whether there are any.
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

    def save_coldest(self) -> None:
        """Have the next nodes to be evicted written, by steps that follow."""
        self._writer.save_evictable(COLDEST_NODES)

    def observe(self, loading_steps: Collection[int], number: int, seconds: float) -> None:
        """Learn from a step that was delayed for `seconds` by its reads and by the fills of the
        steps `loading_steps`. If there were both, a filled byte counts as much as a read one.
        """
        filled_bytes = sum(map(self._loader.filled_bytes, loading_steps))
        read_bytes = self._writer.read_bytes(number)
        byte_seconds = seconds / max(filled_bytes + read_bytes, 1)
        if filled_bytes:
            self._loader.pace.observe(filled_bytes, filled_bytes * byte_seconds)
        if read_bytes:
            self._writer.pace.observe(read_bytes, read_bytes * byte_seconds)

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
        return self._disk.roots()

    def forget(self, namespace: Namespace | None) -> None:
        """A namespace, or all, is being cleared in memory: end its loads, and write nothing of what
        steps are reading of it.
        """
        self._loader.clear(namespace)
        self._writer.drop_reads(namespace)

    def clear(self, namespace: Namespace | None) -> None:
        """Forget the disk entries of one namespace, or all. Blocks still in memory are written
        again when next used.
        """
        self._loader.clear(namespace)
        self._writer.clear(namespace)
        self._disk.clear(None if namespace is None else root_digest(namespace))

    def clear_slowly(self, root: Digest | None) -> None:
        """Remove most of what is on disk of a namespace, or of all, on a thread that may take its
        time. `clear` or `clear_root` follows, on the engine thread.
        """
        self._disk.clear_slowly(root)

    def clear_root(self, root: Digest) -> None:
        """Clear a namespace that only the disk has. Its salt is unknown, so it is none of the
        tree's and none of `namespaces`.
        """
        self._disk.clear(root)

    def end(self) -> None:
        """Begin to write all dirty nodes. Called when no sequence is left and none will come."""
        self._ends_at = self._clock() + self.shutdown_seconds
        self._loader.end()
        self._writer.end()

    def close(self) -> None:
        """Write accepted entries as far as time allows, and close the store."""
        self._loader.end()
        self._disk.flush(max(self._ends_at - self._clock(), 0.0))
        self._disk.close()

    def on_disk(self, hashes: Sequence[Digest]) -> int:
        """How many blocks of a run, given by its hashes, are on disk, from the first on. On any
        thread.
        """
        return self._disk.known(hashes)

    def stats(self) -> DiskCacheStats:
        """On any thread."""
        disk, loads = self._disk.stats(), self._loader.counters
        return DiskCacheStats(
            entries=disk.entries,
            used_bytes=disk.used_bytes,
            shared_bytes=disk.shared_bytes,
            limit_bytes=self._limit_bytes,
            buffered_bytes=disk.buffered_bytes,
            read_bytes=disk.counters.read_bytes,
            written_bytes=disk.counters.written_bytes,
            hits=loads.hits,
            loaded_tokens=loads.loaded_tokens,
            load_seconds=loads.load_seconds,
            given_up_loads=loads.given_up,
            evicted_entries=disk.counters.evicted_entries,
            refused_entries=disk.counters.refused_entries,
            failures={fault.value: count for fault, count in disk.counters.faults.items()},
            write_fault=None if disk.write_fault is None else disk.write_fault.value,
            is_day_spent=disk.is_day_spent,
            ended_threads=disk.ended_threads,
        )


def open_disk_cache(
    config: DiskCacheConfig,
    backend: Backend,
    store: KVStore,
    post: Post,
    report: Callable[[str], None],
) -> DiskCache:
    """Raises DiskError, in words, when the folder cannot be used, or the limit is too small."""
    rules = WriteRules(writes=config.write, salted=config.salted)
    n_tokens = kept_tokens(config.max_bytes, backend.part_bytes, store.block_size)
    if n_tokens < rules.least_tokens:
        raise DiskError(_too_small(config.max_bytes, rules, backend.part_bytes, store.block_size))
    disk = DiskStore.open(
        config.directory,
        f"{backend.card.fingerprint} {backend.kv_format} {backend.software}",
        disk_limits(config, backend.part_bytes),
        daemon=config.daemon,
        model=backend.card.name,
    )
    is_enough = n_tokens >= backend.card.max_sequence_tokens
    kept = "prompts whole" if is_enough else f"of a prompt its first {n_tokens:,} tokens"
    report(f"disk cache: {config.directory}, at most {_mib(config.max_bytes)}, {kept}")
    return DiskCache(
        disk,
        store,
        backend.part_bytes,
        config.max_bytes,
        post,
        rules,
        LoadRules(
            salted=config.salted, limits=load_limits(store.pool.n_blocks, backend.part_bytes)
        ),
        config.shutdown_seconds,
    )


def disk_limits(config: DiskCacheConfig, part_bytes: Sequence[int]) -> DiskLimits:
    """Limits that allow the largest entry: a saved state may have a hundred megabytes."""
    return DiskLimits(
        max_bytes=config.max_bytes,
        buffer_bytes=max(BUFFER_BYTES, sum(part_bytes)),
        daily_bytes=math.inf if config.daily_bytes is None else config.daily_bytes,
    )


def load_limits(n_blocks: int, part_bytes: Sequence[int]) -> LoadLimits:
    """A crowd that comes back leaves most of the blocks to others."""
    *block, state = part_bytes
    arena_bytes = n_blocks * sum(block) + state
    return LoadLimits(arena_bytes // HELD_PART, max(arena_bytes // AHEAD_PART, LEAST_AHEAD_BYTES))


def kept_tokens(max_bytes: int, part_bytes: Sequence[int], block_size: int) -> float:
    """How many tokens of a prompt such a limit keeps at least: every block with what its windows
    have, and a state at the end. Blocks of recurrent layers alone take nothing, and have no limit.
    """
    *block, state = part_bytes
    left_bytes = longest_path(max_bytes) - state
    if left_bytes < 0:
        return 0
    return left_bytes // sum(block) * block_size if any(block) else math.inf


def _too_small(
    max_bytes: int, rules: WriteRules, part_bytes: Sequence[int], block_size: int
) -> str:
    *block, state = part_bytes
    least_bytes = blocks_for(rules.least_tokens, block_size) * sum(block) + state
    return (
        f"a disk cache of {_mib(max_bytes)} is too small for this model: the least that is kept, "
        f"{rules.least_tokens} tokens of a prompt, needs {_mib(holding(least_bytes))}"
    )


def _mib(n_bytes: int) -> str:
    return f"{math.ceil(n_bytes / MIB):,} MiB"
