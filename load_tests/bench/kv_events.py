"""What KV events cost: the engine thread for each block, and the publisher for a whole cache.

    python -m load_tests.bench.kv_events

Prompts of 32 blocks are indexed and evicted again: without hashes, with hashes, which a disk cache
needs, too, and with events. Then a publisher states 40,000 blocks again for a new subscriber. Times
are medians over repeats, and processor time but for the last.
"""

import statistics
import time
import tracemalloc
from collections.abc import Callable
from functools import partial

import typer
import zmq

from engine.kv_events.events import PublishedBlocks, batches
from engine.kv_events.publisher import KVEventPublisher
from engine.values.settings import KVEventsConfig
from kvstore.node import BlockEvent, BlocksStored
from kvstore.pool import BlockPool
from kvstore.tokens import Tokens
from kvstore.tree import RadixTree
from kvstore.types import Namespace

BLOCK_SIZE = 32
PROMPT_BLOCKS = 32
PROMPTS = 1250
EVICTED = 3000


def prompts(n_prompts: int) -> list[bytes]:
    """Packed prompts that share nothing."""
    n_tokens = PROMPT_BLOCKS * BLOCK_SIZE
    starts = (number * 7919 for number in range(n_prompts))
    return [Tokens(range(start, start + n_tokens)).packed(0, n_tokens) for start in starts]


def index(tree: RadixTree, pool: BlockPool, packed: list[bytes]) -> None:
    """Index prompts, whose blocks can be evicted then."""
    for each in packed:
        blocks = pool.allocate(PROMPT_BLOCKS)
        tree.insert(Namespace(), each, blocks)
        tree.offer(pool.release(blocks))


def evict_all(tree: RadixTree) -> None:
    for _ in range(EVICTED):
        tree.evict()


def microseconds(hashes_blocks: bool, notes: bool, repeats: int) -> tuple[float, float]:
    """What it takes to index a block, and to evict one."""
    seconds, packed = [], prompts(200)
    for _ in range(repeats):
        pool = BlockPool(PROMPTS * PROMPT_BLOCKS)
        tree = RadixTree(pool, BLOCK_SIZE, hashes_blocks=hashes_blocks)
        tree.block_events = [] if notes else None
        insert = _timed(partial(index, tree, pool, packed))
        evict = _timed(partial(evict_all, tree))
        seconds.append((insert / (len(packed) * PROMPT_BLOCKS), evict / EVICTED))
    inserts, evicts = zip(*seconds, strict=True)
    return statistics.median(inserts) * 1e6, statistics.median(evicts) * 1e6


def _timed(act: Callable[[], object]) -> float:
    began = time.thread_time()
    act()
    return time.thread_time() - began


def _all_again(tree: RadixTree) -> float:
    """Seconds of the clock from a subscription until all blocks of the tree have arrived."""
    config = KVEventsConfig("tcp://127.0.0.1:0")
    tree.block_events = None
    publisher = KVEventPublisher(config, tree, BLOCK_SIZE, {}, 10**9, lambda call: call())
    publisher.publish_anew()
    while publisher.stats().blocks < PROMPTS * PROMPT_BLOCKS:
        time.sleep(0.01)
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.setsockopt(zmq.RCVTIMEO, 1500)
        subscriber.subscribe("")
        began = last = time.perf_counter()
        subscriber.connect(publisher.source.endpoint)
        try:
            while True:
                subscriber.recv_multipart()
                last = time.perf_counter()
        except zmq.Again:
            pass
    publisher.close()
    return last - began


def main(repeats: int = 7) -> None:
    """Measure, and print a table."""
    print("| | index a block | evict a block |\n| --- | --- | --- |")
    for name, hashes, notes in (
        ("tokens alone", False, False),
        ("with hashes", True, False),
        ("with events", True, True),
    ):
        insert, evict = microseconds(hashes, notes, repeats)
        print(f"| {name} | {insert:.2f} µs | {evict:.2f} µs |")
    pool = BlockPool(PROMPTS * PROMPT_BLOCKS)
    tree = RadixTree(pool, BLOCK_SIZE, hashes_blocks=True)
    tree.block_events = []
    index(tree, pool, prompts(PROMPTS))
    facts, n_blocks = tree.block_events, PROMPTS * PROMPT_BLOCKS
    assert all(isinstance(fact, BlocksStored) for fact in facts)
    print(f"\n{n_blocks} blocks: {_encoded(facts):.2f} s to encode, ", end="")
    print(f"{_all_again(tree):.2f} s until a new subscriber has them, ", end="")
    print(f"{_mirror_bytes(facts) / n_blocks:.0f} bytes a block in the mirror")


def _encoded(facts: list[BlockEvent]) -> float:
    return _timed(lambda: [*batches(PublishedBlocks(BLOCK_SIZE, {}).events(facts, []), 0.0)])


def _mirror_bytes(facts: list[BlockEvent]) -> int:
    blocks = PublishedBlocks(BLOCK_SIZE, {})
    tracemalloc.start()
    for _ in blocks.events(facts, []):
        pass
    n_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return n_bytes


if __name__ == "__main__":
    typer.run(main)
