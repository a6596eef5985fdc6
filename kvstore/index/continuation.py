"""What the tree has behind a run of tokens."""

from bisect import bisect_left
from itertools import islice, takewhile

from kvstore.index.radix_node import Node
from kvstore.tokens import TOKEN_BYTES, unpacked

MOST_BRANCHES = 64
"""Looked at where so many go on: the first of them by their tokens."""


def continuation(root: Node, packed: bytes, most: int, block_bytes: int) -> tuple[int, ...]:
    """The tokens that follow `packed` below `root`, at most `most`; none if it is not all indexed.

    Where several edges go on the most recently used is followed.
    """
    node: Node | None = root
    start, behind, most_bytes = 0, bytearray(), most * TOKEN_BYTES
    while node is not None and len(behind) < most_bytes:
        node = _branch(node, packed[start : start + block_bytes], block_bytes)
        if node is not None:
            shared = node.packed[: len(packed) - start]
            if not packed.startswith(shared, start):
                return ()
            start += len(shared)
            behind += node.packed[len(shared) : len(shared) + most_bytes]
    return tuple(unpacked(bytes(behind[:most_bytes])))  # empty before the end of `packed`


def _branch(node: Node, first: bytes, block_bytes: int) -> Node | None:
    """The child of most recent use among those that begin with these tokens, a block at most."""
    children = node.children
    at = bisect_left(children, first, key=lambda child: bytes(child.packed[:block_bytes]))
    alike = takewhile(
        lambda child: child.packed.startswith(first), islice(children, at, at + MOST_BRANCHES)
    )
    return max(alike, key=lambda child: child.last_used, default=None)
