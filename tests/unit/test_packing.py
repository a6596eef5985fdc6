"""Bytes in are bytes out, in order with copies, and what does not fit is refused."""

import mlx.core as mx
import pytest

from engine.mlx_backend.kv.arena import ArenaError, LayerArena
from engine.mlx_backend.kv.layout import KVCacheSpec, Layout
from engine.mlx_backend.kv.shape import LayerShape
from engine.mlx_backend.kv.storage import Storage
from kvstore.ops import CopyBlock, FillBlock, ReadBlock
from kvstore.sizes import StorageSizes
from kvstore.types import BlockId

MIXED = LayerShape(2, 4, 3, mx.float32, mx.bfloat16)
KEYS_ONLY = LayerShape(1, 5, 0, mx.float16, mx.float16)
A, B, C = BlockId(0), BlockId(1), BlockId(2)


def storage(*shapes: LayerShape, block_size: int = 2, n_blocks: int = 3) -> Storage:
    layout = Layout(tuple(map(KVCacheSpec, shapes)), mx.float32, 10)
    return Storage(layout, StorageSizes(n_blocks), block_size)


def read(held: Storage, block: BlockId) -> bytes:
    reading = held.read([ReadBlock(block, held.full.block_size)])
    [[part, *_]] = reading.parts()
    assert part is not None
    return bytes(part)


def test_copies_and_fills_are_carried_out_in_their_order() -> None:
    held = storage(MIXED, KEYS_ONLY)
    size = held.part_bytes[0]
    first, second = bytes(i % 100 for i in range(size)), bytes([7]) * size
    held.execute(
        [FillBlock(A, first), CopyBlock(A, B, 2), FillBlock(A, second), CopyBlock(A, C, 2)]
    )
    assert [read(held, block) for block in (A, B, C)] == [second, first, second]


def test_blocks_that_lie_side_by_side_are_filled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the order in which they come."""
    held, put_blocks = storage(MIXED, KEYS_ONLY, n_blocks=9), LayerArena.put_blocks
    puts = list[tuple[int, int]]()

    def note_and_put(layer: LayerArena, first: int, keys: mx.array, values: mx.array) -> None:
        puts.append((first, len(keys)))
        put_blocks(layer, first, keys, values)

    monkeypatch.setattr(LayerArena, "put_blocks", note_and_put)
    size = held.part_bytes[0]
    blocks = [BlockId(block) for block in (5, 2, 8, 3, 1)]
    held.execute([FillBlock(block, bytes([block + 1]) * size) for block in blocks])
    expected = [bytes([block + 1 if block in blocks else 0]) * size for block in range(9)]
    assert [read(held, BlockId(block)) for block in range(9)] == expected
    n_layers = 2
    assert sorted(puts) == sorted([(1, 3), (5, 1), (8, 1)] * n_layers)


@pytest.mark.device
def test_a_fill_that_is_built_while_a_write_is_in_flight_copies_no_pool() -> None:
    """It is computed when that has been."""
    shape, n_blocks = LayerShape(1, 64, 64, mx.float32, mx.float32), 1024
    held = storage(shape, block_size=32, n_blocks=n_blocks)
    mx.eval(held.arrays())
    (layer,) = held.full.layers
    slow = mx.ones((512, 512))
    for _ in range(20):
        slow = slow @ slow / 512
    slot_mapping = held.full.slot_mapping(
        mx.array([0], mx.uint32), mx.array([0], mx.uint32), layer.heads
    )
    layer.write(slot_mapping, slow[:1, :64].reshape(1, 1, 1, 64), mx.ones((1, 1, 1, 64)))
    mx.async_eval(layer.fences())
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    held.execute([FillBlock(BlockId(7), bytes([1]) * held.part_bytes[0])])
    mx.synchronize()
    mx.eval(held.arrays())
    pool_bytes = n_blocks * 32 * 64 * 4
    assert mx.get_peak_memory() - before < pool_bytes
    assert read(held, BlockId(7)) == bytes([1]) * held.part_bytes[0]


@pytest.mark.parametrize("shape", [MIXED, KEYS_ONLY], ids=["several arrays", "one"])
def test_what_was_read_stays_when_its_block_is_overwritten(shape: LayerShape) -> None:
    """It is handed on where MLX has it, and written to disk later."""
    held = storage(shape)
    size = held.part_bytes[0]
    first, second = bytes(i % 100 for i in range(size)), bytes([7]) * size
    held.execute([FillBlock(A, first)])
    [[part, *_]] = held.read([ReadBlock(A, held.full.block_size)]).parts()
    held.execute([FillBlock(A, second)])
    assert read(held, A) == second
    assert part == first


def test_another_size_and_another_block_are_refused() -> None:
    held = storage(MIXED)
    data = bytes(held.part_bytes[0])
    with pytest.raises(ArenaError, match="bytes to fill in"):
        held.execute([FillBlock(A, data[1:])])
    with pytest.raises(ArenaError, match="block 3"):
        held.execute([FillBlock(BlockId(3), data)])


def test_the_format_differs_where_the_bytes_would() -> None:
    formats = {
        storage(MIXED).kv_format,
        storage(MIXED, MIXED).kv_format,
        storage(MIXED, KEYS_ONLY).kv_format,
        storage(KEYS_ONLY, MIXED).kv_format,
        storage(MIXED, block_size=4).kv_format,
        storage(LayerShape(2, 4, 3, mx.float32, mx.float32)).kv_format,
    }
    assert len(formats) == 6
    name, code = storage(MIXED, MIXED).kv_format.split(" code=")
    assert name == "kv1 block=2 full=2*2x4float32+3bfloat16 state="
    assert len(code) == 16
