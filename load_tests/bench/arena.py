"""What the arena's operations cost, whatever its size, and how its layout compares. No model.

    python -m load_tests.bench.arena

One layer of 4 KV heads of 64, blocks of 32 tokens, float32. Times are medians in microseconds.
"""

import statistics
import time
from collections.abc import Callable

import mlx.core as mx
import numpy as np

from engine.mlx_backend.kv.arena import Arena, LayerShape
from kvstore.ops import CopyBlock
from kvstore.types import BlockId

KV_HEADS, BLOCK_SIZE, DIM = 4, 32, 64
ROWS, TABLE_BLOCKS = 8, 12
POOLS = (256, 1024, 4096, 16384)
REPEATS = 40


def median_us(work: Callable[[], object]) -> float:
    """Median time of `work`, with what it made evaluated."""
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        mx.eval(work())
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) * 1e6


def arena_costs(n_blocks: int) -> dict[str, float]:
    """Write 8 decodes, write a chunk of 512 tokens, copy one block, gather 8 x 12 blocks."""
    arena = Arena([LayerShape(KV_HEADS, DIM, DIM, mx.float32, mx.float32)], n_blocks, BLOCK_SIZE)
    layer = arena.layers[0]
    random = np.random.default_rng(0)
    table = mx.array(random.permutation(n_blocks)[: ROWS * TABLE_BLOCKS].astype(np.uint32))
    heads = arena.gather_ids(table.reshape(ROWS, TABLE_BLOCKS), layer.heads)

    def writer(positions: np.ndarray, rows: int) -> Callable[[], object]:
        blocks, slots = mx.array(positions // BLOCK_SIZE), mx.array(positions % BLOCK_SIZE)
        slot_mapping = arena.slot_mapping(blocks, slots, layer.heads)
        new = mx.random.normal((rows, KV_HEADS, len(positions) // rows, DIM))
        mx.eval(slot_mapping, new)

        def write() -> object:
            layer.write(slot_mapping, new, new)
            return arena.planes()

        return write

    def copy() -> object:
        arena.copy([CopyBlock(BlockId(0), BlockId(1), arena.block_size)])
        return arena.planes()

    scattered = random.permutation(n_blocks * BLOCK_SIZE)[:ROWS].astype(np.uint32)
    return {
        "write 8 rows": median_us(writer(scattered, ROWS)),
        "write 512 tokens": median_us(writer(np.arange(512, dtype=np.uint32), 1)),
        "copy a block": median_us(copy),
        "gather 8 x 12": median_us(lambda: layer.read(heads)),
    }


def gather_costs(n_blocks: int = 1024) -> dict[str, float]:
    """K of 8 rows x 12 blocks as contiguous `[rows, heads, tokens, dim]`, from three layouts."""
    random = np.random.default_rng(0)
    table = random.permutation(n_blocks)[: ROWS * TABLE_BLOCKS].reshape(ROWS, TABLE_BLOCKS)
    ids = mx.array(table.astype(np.uint32))
    heads = mx.arange(KV_HEADS, dtype=mx.uint32)[None, :, None]
    by_block, by_head = ids[:, None] * KV_HEADS + heads, ids[:, None] + heads * n_blocks
    shape = (ROWS, KV_HEADS, TABLE_BLOCKS * BLOCK_SIZE, DIM)
    pool = mx.random.normal((n_blocks, KV_HEADS, BLOCK_SIZE, DIM))
    runs = pool.reshape(-1, BLOCK_SIZE * DIM)
    tokens = pool.reshape(n_blocks, BLOCK_SIZE, KV_HEADS, DIM)
    mx.eval(ids, by_block, by_head, pool)
    return {
        "[blocks, heads, block, dim], 2-D gather": median_us(lambda: runs[by_block].reshape(shape)),
        "[heads, blocks, block, dim], 2-D gather": median_us(lambda: runs[by_head].reshape(shape)),
        "[blocks, heads, block, dim], transposed": median_us(
            lambda: mx.contiguous(pool[ids].transpose(0, 2, 1, 3, 4)).reshape(shape)
        ),
        "[blocks, block, heads, dim], transposed": median_us(
            lambda: mx.contiguous(tokens[ids].transpose(0, 3, 1, 2, 4)).reshape(shape)
        ),
    }


def copy_costs(n_blocks: int = 1024) -> dict[str, float]:
    """Read one block out of the pool and put it back elsewhere, from either layout."""
    pools = {
        "[blocks, heads, block, dim]": mx.zeros((n_blocks, KV_HEADS, BLOCK_SIZE * DIM)),
        "[heads, blocks, block, dim]": mx.zeros((KV_HEADS, n_blocks, BLOCK_SIZE * DIM)),
    }
    source, target = mx.array([3]), mx.array([4])
    mx.eval(pools, source, target)

    def by_block() -> mx.array:
        pool = pools.pop("[blocks, heads, block, dim]")
        content = pool[source]
        mx.eval(content)
        pool[target] = content
        pools["[blocks, heads, block, dim]"] = pool
        return pool

    def by_head() -> mx.array:
        pool = pools.pop("[heads, blocks, block, dim]")
        content = pool[:, source]
        mx.eval(content)
        pool[:, target] = content
        pools["[heads, blocks, block, dim]"] = pool
        return pool

    return {
        "[blocks, heads, block, dim], copy": median_us(by_block),
        "[heads, blocks, block, dim], copy": median_us(by_head),
    }


def main() -> None:
    for n_blocks in POOLS:
        costs = "  ".join(f"{name} {us:,.0f}" for name, us in arena_costs(n_blocks).items())
        print(f"{n_blocks:>6} blocks: {costs}")
    for name, us in {**gather_costs(), **copy_costs()}.items():
        print(f"{name:<42} {us:>8,.0f}")


if __name__ == "__main__":
    main()
