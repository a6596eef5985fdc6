"""What it costs to watch a large tree. No model, no tensors.

    python -m load_tests.bench.pictures [--nodes 10000]

The first snapshots copy the tree bit by bit; those after tell what has changed, here one prompt
served between two of them. Both are the engine thread's time. Pictures, and their JSON, are made on
another thread. All are processor seconds of their thread, in milliseconds. What is in the tree at
first is on disk as well.
"""

import math
import random
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console

from engine.core.metrics import LatencyTracker
from engine.core.request import Limits
from engine.core.scheduler import Scheduler
from engine.core.statistics import loop_stats
from engine.disk_cache.cache import TieredCache
from engine.disk_cache.loader import LoadRules
from engine.disk_cache.writer import WriteRules
from engine.output.text import OutputFactory
from engine.values.settings import DiskWrites
from engine.values.stats import HitRecord
from engine.watch.picture import Renderer
from engine.watch.snapshot import Snapshot, SnapshotTaker
from kvstore.lease import Refusal
from kvstore.pool import BlockPool
from kvstore.sizes import StorageBytes
from kvstore.store import KVStore
from kvstore.tier.tier import DiskTier
from kvstore.tier.types import TierLimits
from kvstore.tokens import Tokens
from kvstore.tree import RadixTree
from kvstore.types import Namespace
from load_tests.bench.steps import silent
from load_tests.report import Table
from server.metrics.telemetry import EngineTelemetry
from server.schemas.cache_tree import CacheTree

BLOCK_TOKENS = 16
DISK_BYTES = 1 << 30
MOST_BLOCKS = 10  # of what a prompt adds
NAMESPACE = Namespace(model="benchmark")
VOCABULARY = 150_000


class Branches:
    """Prompts that leave earlier ones somewhere, so that the tree is deep and fragmented."""

    def __init__(self, nodes: int, seed: int, directory: Path) -> None:
        self._random = random.Random(seed)
        self._prompts: list[list[int]] = [[]]
        pool = BlockPool((nodes + 100) * MOST_BLOCKS)
        self.store = KVStore(pool, RadixTree(pool, BLOCK_TOKENS, time.monotonic), BLOCK_TOKENS)
        self.disk = TieredCache(
            DiskTier.open(directory, "benchmark", TierLimits(DISK_BYTES)),
            *(self.store, (1, 0), DISK_BYTES, lambda told: told()),
            WriteRules(writes=DiskWrites.ALL),
            LoadRules(),
        )
        while self.store.index.n_nodes < nodes:
            self.serve()
        while reads := self.disk.reads(0, math.inf):
            self.disk.commit(0, [(b"b", None)] * len(reads))

    def serve(self) -> None:
        """One of them, which nobody writes to disk."""
        base = self._random.choice(self._prompts[-500:])
        cut = self._random.randint(0, len(base) // BLOCK_TOKENS) * BLOCK_TOKENS
        length = self._random.randint(BLOCK_TOKENS, MOST_BLOCKS * BLOCK_TOKENS)
        prompt = base[:cut] + self._random.choices(range(VOCABULARY), k=length)
        self._prompts.append(prompt)
        lease = self.store.admit(NAMESPACE, Tokens(prompt))
        if isinstance(lease, Refusal):
            raise RuntimeError(f"the pool is too small for the benchmark: {lease}")
        self.store.extend(lease, len(prompt) - lease.planned_tokens)
        self.store.publish(lease, len(prompt))
        self.store.donate(lease)


class Watch:
    """The two ends of it, each timed."""

    def __init__(self, branches: Branches) -> None:
        limits = Limits(VOCABULARY, 10**6, 10**9, 32, 1024, 512)
        outputs = OutputFactory(frozenset(), silent)
        scheduler = Scheduler(
            branches.store, outputs, limits, draw_seed=lambda: 0, disk=branches.disk
        )
        sizes = StorageBytes(block=0, slots=(), arenas=0)
        latency = LatencyTracker(time.monotonic, EngineTelemetry())
        self._snapshots = SnapshotTaker(
            scheduler, latency, lambda: loop_stats(scheduler, latency, sizes, HitRecord(), 0)
        )
        self._renderer = Renderer(BLOCK_TOKENS, 0, branches.disk)

    def look(self) -> tuple[Snapshot, float]:
        began = time.thread_time()
        snapshot = self._snapshots.take()
        return snapshot, time.thread_time() - began

    def apply(self, snapshot: Snapshot) -> None:
        self._renderer.apply(snapshot)

    def render(self) -> tuple[int, int, float]:
        """Nodes and bytes of a picture, and the seconds that it took."""
        began = time.thread_time()
        tree = CacheTree.of(self._renderer.render(1, 1), "benchmark")
        body = tree.model_dump_json().encode()
        return len(tree.nodes), len(body), time.thread_time() - began


def measure(nodes: int, repeats: int, directory: Path) -> Table:
    branches = Branches(nodes, 1, directory)
    watch = Watch(branches)
    copying, telling, rendering = list[float](), list[float](), list[float]()
    is_whole = False
    while not is_whole:
        snapshot, seconds = watch.look()
        is_whole = snapshot.is_whole
        copying.append(seconds)
        watch.apply(snapshot)
    for _ in range(repeats):
        branches.serve()
        snapshot, seconds = watch.look()
        telling.append(seconds)
        watch.apply(snapshot)
        shown, n_bytes, seconds = watch.render()
        rendering.append(seconds)
    rows = (
        ("nodes, of which shown", f"{branches.store.index.n_nodes:,}, {shown:,}"),
        ("JSON, bytes", f"{n_bytes:,}"),
        ("first snapshots: how many, longest ms", f"{len(copying)}, {1e3 * max(copying):.2f}"),
        ("a snapshot, median and longest ms", _milliseconds(telling)),
        ("a picture as JSON, median and longest ms", _milliseconds(rendering)),
    )
    branches.disk.close()
    return Table(("", "of another thread, but for snapshots"), rows)


def _milliseconds(seconds: list[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.2f}, {1e3 * max(seconds):.2f}"


def main(
    nodes: Annotated[int, typer.Option(min=1, help="Of the tree.")] = 10_000,
    repeats: Annotated[int, typer.Option(min=1)] = 50,
) -> None:
    """Fill a tree, watch it, and time both ends."""
    with TemporaryDirectory() as directory:
        Console(width=100).print(measure(nodes, repeats, Path(directory)).rich())


if __name__ == "__main__":
    typer.run(main)
