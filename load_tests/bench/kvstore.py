"""What the KV store costs with a large index. No model, no tensors.

    python -m load_tests.bench.kvstore [--json PATH]

The index holds a base prompt with about as many branches, at random depths, as it has blocks, so
that its path has hundreds of nodes, and unrelated prompts of mixed lengths up to the given number
of blocks. Then, for three prompts - the base prompt again, one that leaves it half way, one that
nobody has seen - it measures a probe and a whole request (admit, extend, publish, donate), and at
last single evictions. Times are medians over repeats; of the three prompts the slowest is shown.

The rows with the shorter prompt differ in the size of the index alone: the cost of a token should
not grow from one to the next.
"""

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from kvstore.lease import Refusal
from kvstore.pool import BlockPool, blocks_for
from kvstore.store import KVStore
from kvstore.tokens import Tokens
from kvstore.tree import RadixTree
from kvstore.types import Namespace
from load_tests.report import Table
from load_tests.terminal import show_figures

BLOCK_SIZE_TOKENS = 32
BRANCH_TOKENS = 64
CASES = ((1_000, 8_192), (10_000, 8_192), (100_000, 8_192), (100_000, 32_768))
"""Blocks in the index, tokens of a prompt."""
VOCABULARY = 150_000
NAMESPACE = Namespace(model="benchmark")


@dataclass(frozen=True, slots=True)
class Figures:
    """Medians, in the units that the issue's targets have."""

    indexed_blocks: int
    prompt_tokens: int
    nodes: int
    probe_milliseconds: dict[str, float]
    request_milliseconds: dict[str, float]
    probe_nanoseconds_per_token: float
    request_nanoseconds_per_token: float
    eviction_mean_microseconds: float
    eviction_p99_microseconds: float


class Workload:
    """Prompts of one seed, and a store that has served them."""

    def __init__(self, indexed_blocks: int, prompt_tokens: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._prompt_tokens = prompt_tokens
        self.base = self.unrelated(prompt_tokens)
        room_blocks = 4 * blocks_for(prompt_tokens, BLOCK_SIZE_TOKENS)
        pool = BlockPool(indexed_blocks + room_blocks)
        self.tree = RadixTree(pool, BLOCK_SIZE_TOKENS)
        self.store = KVStore(pool, self.tree, BLOCK_SIZE_TOKENS)
        self._fill(indexed_blocks)

    def unrelated(self, n_tokens: int) -> list[int]:
        return self._random.choices(range(VOCABULARY), k=n_tokens)

    def leaving_half_way(self) -> list[int]:
        """The first half of the base prompt, then something else."""
        half_tokens = self._prompt_tokens // 2
        return self.base[:half_tokens] + self.unrelated(self._prompt_tokens - half_tokens)

    def serve(self, tokens: Tokens) -> None:
        """One request from admission to donation, as the scheduler would, its forward left out."""
        self.store.begin_step()
        lease = self.store.admit(NAMESPACE, tokens)
        if isinstance(lease, Refusal):
            raise RuntimeError(f"the pool is too small for the benchmark: {lease}")
        n_tokens = len(tokens) - lease.written_tokens
        self.store.plan(lease, n_tokens)
        self.store.commit(lease, n_tokens)
        self.store.donate(lease)
        self.store.take_ops()

    def _fill(self, indexed_blocks: int) -> None:
        self.serve(Tokens(self.base))
        pool = self.store.pool
        for _ in range(blocks_for(self._prompt_tokens, BLOCK_SIZE_TOKENS)):
            depth_tokens = self._random.randrange(self._prompt_tokens)
            self.serve(Tokens(self.base[:depth_tokens] + self.unrelated(BRANCH_TOKENS)))
        while pool.n_evictable < indexed_blocks:
            left_tokens = (indexed_blocks - pool.n_evictable) * BLOCK_SIZE_TOKENS
            length_tokens = self._random.choice((100, 500, 2_000, 8_000))
            self.serve(Tokens(self.unrelated(min(length_tokens, left_tokens))))


def median_seconds(operation: Callable[[Tokens], object], prompts: list[Tokens]) -> float:
    """The median time of the operation over the prompts, one run for each."""
    times = []
    for prompt in prompts:
        start = time.perf_counter()
        operation(prompt)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def eviction_seconds(tree: RadixTree, evictions: int) -> list[float]:
    """How long each of that many evictions takes, least first."""
    times = []
    for _ in range(evictions):
        start = time.perf_counter()
        tree.evict()
        times.append(time.perf_counter() - start)
    return sorted(times)


def measure(indexed_blocks: int, prompt_tokens: int, repeats: int, evictions: int) -> Figures:
    """Fill a store and measure it. Evictions come last, as they empty it."""
    workload = Workload(indexed_blocks, prompt_tokens, seed=1)
    store = workload.store
    filled_nodes, filled_blocks = workload.tree.n_nodes, store.pool.n_evictable
    prompts: dict[str, Callable[[], list[int]]] = {
        "resent": lambda: workload.base,
        "leaving half way": workload.leaving_half_way,
        "unseen": lambda: workload.unrelated(prompt_tokens),
    }
    probes, requests = {}, {}
    for name, draw in prompts.items():
        drawn = [Tokens(draw()) for _ in range(repeats)]
        probes[name] = median_seconds(lambda tokens: store.probe(NAMESPACE, tokens), drawn)
        requests[name] = median_seconds(workload.serve, drawn)
    times = eviction_seconds(workload.tree, min(evictions, store.pool.n_evictable))
    return Figures(
        indexed_blocks=filled_blocks,
        prompt_tokens=prompt_tokens,
        nodes=filled_nodes,
        probe_milliseconds={name: 1e3 * seconds for name, seconds in probes.items()},
        request_milliseconds={name: 1e3 * seconds for name, seconds in requests.items()},
        probe_nanoseconds_per_token=1e9 * max(probes.values()) / prompt_tokens,
        request_nanoseconds_per_token=1e9 * max(requests.values()) / prompt_tokens,
        eviction_mean_microseconds=1e6 * statistics.mean(times),
        eviction_p99_microseconds=1e6 * times[len(times) * 99 // 100],
    )


def table(all_figures: list[Figures]) -> Table:
    """One row for each size of the index; of the three prompts the slowest counts."""
    columns = (
        "blocks",
        "prompt",
        "nodes",
        "probe ms",
        "ns/token",
        "request ms",
        "ns/token",
        "evict us",
        "p99 us",
    )
    rows = (
        (
            f"{figures.indexed_blocks:,}",
            f"{figures.prompt_tokens:,}",
            f"{figures.nodes:,}",
            f"{max(figures.probe_milliseconds.values()):.2f}",
            f"{figures.probe_nanoseconds_per_token:.0f}",
            f"{max(figures.request_milliseconds.values()):.2f}",
            f"{figures.request_nanoseconds_per_token:.0f}",
            f"{figures.eviction_mean_microseconds:.1f}",
            f"{figures.eviction_p99_microseconds:.1f}",
        )
        for figures in all_figures
    )
    return Table(columns, tuple(rows))


def main(
    repeats: int = 9,
    evictions: int = 20_000,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure the store at several sizes of its index."""
    all_figures = [measure(*case, repeats, evictions) for case in CASES]
    show_figures(table(all_figures), all_figures, json_path)


if __name__ == "__main__":
    typer.run(main)
