"""The nodes of a radix tree, and the match that it finds."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from kvstore.blocks.table import blocks_for
from kvstore.tokens import TOKEN_BYTES, unpacked
from kvstore.types import BlockId, Namespace


class Node:
    """One edge of the tree. `packed` are its tokens, `blocks` their blocks, in order."""

    __slots__ = (
        *("blocks", "children", "last_used", "namespace", "packed", "parent", "queued", "serial"),
    )

    def __init__(
        self,
        serial: int,
        namespace: Namespace,
        parent: "Node | None",
        packed: bytes | bytearray,
        last_used: float,
    ) -> None:
        self.serial = serial
        self.namespace = namespace
        self.parent = parent
        self.packed = bytearray(packed)
        self.blocks: list[BlockId] = []
        self.children: list[Node] = []
        self.last_used = last_used
        self.queued = False  # has its one entry in the eviction queue

    def token_ids(self, most: int) -> tuple[int, ...]:
        """The first of its tokens, no more than `most`."""
        return tuple(unpacked(bytes(self.packed[: most * TOKEN_BYTES])))


class Root(Node):
    """Where the prefixes of one namespace begin. Has no edge."""

    __slots__ = ()

    def __init__(self, serial: int, namespace: Namespace) -> None:
        super().__init__(serial, namespace, None, b"", 0)


def each_below(pending: list[Node]) -> Iterator[Node]:
    """These nodes and all below them, as they are when they come up; parents first."""
    while pending:
        node = pending.pop()
        if node.blocks:  # else it has left the tree since
            pending += node.children
            yield node


@dataclass(frozen=True, slots=True)
class Match:
    """The longest indexed prefix of a run of tokens.

    `blocks` hold its `n_tokens` tokens; the last one may hold more, or other tokens behind them.
    """

    n_tokens: int
    blocks: tuple[BlockId, ...]
    path: tuple[Node, ...]

    def until(self, n_tokens: int, block_size: int) -> "Match":
        """What there is of it in the first `n_tokens` tokens."""
        blocks = self.blocks[: blocks_for(n_tokens, block_size)]
        above = accumulate((len(node.blocks) for node in self.path), initial=0)
        path = [node for node, start in zip(self.path, above, strict=False) if start < len(blocks)]
        return Match(n_tokens, blocks, tuple(path))
