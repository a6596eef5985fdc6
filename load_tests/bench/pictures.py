"""What it costs to watch a large tree. No model, no tensors.

    python -m load_tests.bench.pictures [--nodes 10000]

A prompt is served between any two snapshots, so that each snapshot walks the tree on the engine
thread. Another thread makes pictures and their JSON. All times are processor time of their thread
in milliseconds. What is in the tree at first is on disk as well.
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

from engine.core.budget import StepBudget, StepCosts
from engine.core.metrics import Metrics
from engine.core.request import Limits
from engine.core.scheduler import Scheduler
from engine.disk_cache.cache import DiskCache
from engine.disk_cache.loader import LoadRules
from engine.disk_cache.writer import WriteRules
from engine.output.text import output_factory
from engine.values.settings import DiskWrites
from engine.watch.feed import Rendered, Renderer
from engine.watch.snapshot import EngineSnapshot, SnapshotTaker
from kvstore.disk.store import DiskStore
from kvstore.disk.types import DiskLimits
from kvstore.lease import Refusal
from kvstore.ops import ReadBlock
from kvstore.pool import BlockPool
from kvstore.sizes import StorageBytes
from kvstore.store import KVStore
from kvstore.tokens import Tokens
from kvstore.tree import RadixTree
from kvstore.types import Namespace
from load_tests.bench.steps import silent
from load_tests.report import Table
from server.schemas import CacheTree

BLOCK_TOKENS = 16
DISK_BYTES = 1 << 30
MOST_BLOCKS = 10  # of what a prompt adds
NAMESPACE = Namespace(model="benchmark")
VOCABULARY = 150_000


class Branches:
    """Prompts that branch off from earlier ones, so that the tree is deep and fragmented."""

    def __init__(self, nodes: int, seed: int, directory: Path) -> None:
        self._random = random.Random(seed)
        self._prompts: list[list[int]] = [[]]
        pool = BlockPool((nodes + 100) * MOST_BLOCKS)
        self.tree = RadixTree(pool, BLOCK_TOKENS, time.monotonic, hashes_blocks=True)
        self.store = KVStore(pool, self.tree, BLOCK_TOKENS)
        self.disk = DiskCache(
            DiskStore.open(directory, "benchmark", DiskLimits(DISK_BYTES)),
            *(self.store, (1, 0), DISK_BYTES, lambda call: call()),
            WriteRules(writes=DiskWrites.ALL),
            LoadRules(),
        )
        while self.tree.n_nodes < nodes:
            self.serve()
        budget = StepBudget(StepCosts(), math.inf)
        while self.disk.add_reads(0, budget):
            reads = [op for _, op in self.store.take_ops() if isinstance(op, ReadBlock)]
            self.disk.commit(0, [(b"b", None)] * len(reads))

    def serve(self) -> None:
        """Serve one prompt, which is not written to disk."""
        base = self._random.choice(self._prompts[-500:])
        cut = self._random.randint(0, len(base) // BLOCK_TOKENS) * BLOCK_TOKENS
        length = self._random.randint(BLOCK_TOKENS, MOST_BLOCKS * BLOCK_TOKENS)
        prompt = base[:cut] + self._random.choices(range(VOCABULARY), k=length)
        self._prompts.append(prompt)
        lease = self.store.admit(NAMESPACE, Tokens(prompt))
        if isinstance(lease, Refusal):
            raise RuntimeError(f"the pool is too small for the benchmark: {lease}")
        n_tokens = len(prompt) - lease.planned_tokens
        self.store.plan(lease, n_tokens)
        self.store.commit(lease, n_tokens)
        self.store.donate(lease)
        self.store.take_ops()


class Watch:
    """Takes snapshots and draws them, each timed."""

    def __init__(self, branches: Branches) -> None:
        limits = Limits(VOCABULARY, 10**6, 10**9, 32, 1024, 512)
        outputs = output_factory(frozenset(), silent)
        scheduler = Scheduler(
            branches.store, outputs, limits, lambda: 0, Metrics(), disk=branches.disk
        )
        self._snapshots = SnapshotTaker(scheduler, StorageBytes(block=0, slots=(), arenas=0))
        self._renderer = Renderer(BLOCK_TOKENS, branches.disk)
        self._last: Rendered | None = None

    def look(self) -> tuple[EngineSnapshot, float]:
        began = time.thread_time()
        snapshot = self._snapshots.take()
        return snapshot, time.thread_time() - began

    def render(self, copy: EngineSnapshot) -> tuple[int, int, float]:
        """Nodes and bytes of a snapshot as JSON, and the seconds that it took."""
        began = time.thread_time()
        self._last = self._renderer.render(copy, self._last)
        tree = CacheTree.of(self._last.snapshot, "benchmark")
        body = tree.model_dump_json().encode()
        return len(tree.nodes), len(body), time.thread_time() - began


def measure(nodes: int, repeats: int, directory: Path) -> Table:
    branches = Branches(nodes, 1, directory)
    watch = Watch(branches)
    walking, idling, rendering = list[float](), list[float](), list[float]()
    for _ in range(repeats):
        branches.serve()
        snapshot, seconds = watch.look()
        walking.append(seconds)
        idling.append(watch.look()[1])
        shown, n_bytes, seconds = watch.render(snapshot)
        rendering.append(seconds)
    rows = (
        ("nodes, of which shown", f"{branches.tree.n_nodes:,}, {shown:,}"),
        ("JSON, bytes", f"{n_bytes:,}"),
        ("a snapshot, median and longest ms", _milliseconds(walking)),
        ("without a change, median and longest ms", _milliseconds(idling)),
        ("a picture as JSON, median and longest ms", _milliseconds(rendering)),
    )
    branches.disk.close()
    return Table(("", "snapshots: engine thread; pictures: another"), rows)


def _milliseconds(seconds: list[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.2f}, {1e3 * max(seconds):.2f}"


def main(
    nodes: Annotated[int, typer.Option(min=1, help="Of the tree.")] = 10_000,
    repeats: Annotated[int, typer.Option(min=1)] = 50,
) -> None:
    """Fill a tree, watch it, and time snapshots and pictures."""
    with TemporaryDirectory() as directory:
        Console(width=100).print(measure(nodes, repeats, Path(directory)).rich())


if __name__ == "__main__":
    typer.run(main)
