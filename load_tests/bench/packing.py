"""How fast blocks become bytes, and bytes blocks: `python -m load_tests.bench.packing`. No model.

28 layers of 8 KV heads of 128, blocks of 32 tokens, apart and side by side. Medians; the device is
idle before each.
"""

import statistics
import time
from collections.abc import Callable

import mlx.core as mx

from engine.mlx_backend.kv.arena import Arena, LayerShape
from engine.mlx_backend.kv.storage import PendingTransfer, fill_blocks
from kvstore.types import BlockId

LAYERS, KV_HEADS, DIM, BLOCK_SIZE, N_BLOCKS = 28, 8, 128, 32, 64
BYTES = 8e6
REPEATS = 20


def median_seconds(work: Callable[[], object]) -> float:
    """Of one call of `work`."""
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def report(dtype: mx.Dtype, stride: int) -> str:
    """What about 8 MB take, each way, in every so many-th block."""
    shape = LayerShape(KV_HEADS, DIM, DIM, dtype, dtype)
    arena = Arena([shape] * LAYERS, N_BLOCKS, BLOCK_SIZE)
    n_blocks = max(round(BYTES / (arena.bytes / N_BLOCKS)), 1)
    blocks = [BlockId(stride * index) for index in range(n_blocks)]
    contents = dict(zip(blocks, map(bytes, read(arena, blocks)), strict=True))
    n_bytes = sum(map(len, contents.values()))
    reading = median_seconds(lambda: read(arena, blocks))
    filling = median_seconds(lambda: fill_blocks(arena, contents))
    return (
        f"{dtype}, every {stride}: {n_bytes / 1e6:.1f} MB read in {1e3 * reading:.1f} ms "
        f"({n_bytes / reading / 1e9:.2f} GB/s), filled in {1e3 * filling:.1f} ms "
        f"({n_bytes / filling / 1e9:.2f} GB/s)"
    )


def read(arena: Arena, blocks: list[BlockId]) -> list[memoryview]:
    """Whole blocks."""
    contents = arena.contents(blocks, [BLOCK_SIZE] * len(blocks))
    transfer = PendingTransfer(range(len(blocks)), (array for pair in contents for array in pair))
    mx.eval(transfer.arrays())
    return list(transfer.read().values())


if __name__ == "__main__":
    for dtype in (mx.float32, mx.bfloat16):
        for stride in (7, 1):
            print(report(dtype, stride))
