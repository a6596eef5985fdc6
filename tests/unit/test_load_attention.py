"""The load tests' benchmark of attention: the arenas and tables that it measures."""

from collections.abc import Callable

import mlx.core as mx
import pytest

from engine.mlx_backend.kv.arena import Arena
from load_tests.bench import attention
from measuring.device import filled_arena

LINES = {
    "decode": lambda: attention.decode_line(attention.Decode("2 x 64", [64, 64]), mx.float32, 1),
    "chunk": lambda: attention.chunk_line(96, 32, mx.float32, 1),
}


@pytest.mark.parametrize("line", LINES.values(), ids=LINES.keys())
def test_the_arena_has_the_blocks_of_the_rows_and_no_more(
    line: Callable[[], tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """128 tokens are four blocks of 32. A longer table would make gathers look slow."""
    n_blocks = list[int]()

    def filled(n: int, dtype: mx.Dtype) -> Arena:
        n_blocks.append(n)
        return filled_arena(n, dtype)

    monkeypatch.setattr(attention, "filled_arena", filled)
    assert all(line())
    assert n_blocks == [4]
