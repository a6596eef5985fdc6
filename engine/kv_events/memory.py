"""The memory that publishing KV events takes in addition to the blocks themselves.

Imports neither ZeroMQ nor msgspec: a plan is made whether or not events are published.
"""

from kvstore.tokens import TOKEN_BYTES

REPLAY_BYTES = 64 * 1024**2
"""Limit of the batches that are kept for replays."""

_NAME_BYTES = 320
"""Upper bound of what is kept of a published block, apart from its token ids: 280 to 304 bytes were
measured with CPython 3.11, with blocks of 16 to 128 tokens in runs of 1 to 32 blocks.
"""


def published_block_bytes(block_size: int) -> int:
    """What a block of this many tokens takes: its token ids where it is published, in facts that
    wait, and in those of all blocks, which are made where too many facts wait.
    """
    return _NAME_BYTES + 3 * block_size * TOKEN_BYTES
