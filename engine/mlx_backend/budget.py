"""How many bytes the arena gets. Pure functions."""

from engine.mlx_backend.errors import ModelError

GPU_SHARE = 0.8
CPU_SHARE = 0.1  # the machine is not ours alone, and the arena is touched at start


def default_kv_bytes(left_bytes: int, share: float, useful_bytes: int) -> int:
    """A share of what the machine has left after the weights, but no more than is useful."""
    return min(int(max(left_bytes, 0) * share), useful_bytes)


def arena_blocks(kv_bytes: int, block_bytes: int, max_running: int) -> int:
    """How many blocks a budget buys.

    Raises ModelError when that is less than one for each running sequence.
    """
    blocks = kv_bytes // block_bytes
    if blocks < max_running:
        raise ModelError(
            f"a KV cache of {kv_bytes:,} bytes holds {blocks} blocks of {block_bytes:,} bytes, "
            f"fewer than the {max_running} sequences that may run: "
            f"raise kv_cache_bytes to at least {max_running * block_bytes:,} or lower max_running"
        )
    return blocks
