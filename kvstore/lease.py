"""What the store hands a sequence: its table and its references, released exactly once."""

from dataclasses import dataclass

from kvstore.block_table import BlockTable
from kvstore.groups.group import Hold
from kvstore.tokens import Tokens
from kvstore.types import Namespace


@dataclass(eq=False, slots=True)
class Lease:
    """The KV of one sequence. Only the store changes it; its owner reads.

    `tokens` belongs to the sequence and grows as it generates. Positions [0, cached_tokens) were
    adopted; [0, written_tokens) hold KV that was adopted or that a step has computed;
    positions from there to `writable_tokens` are in blocks that nobody else refers to. The first
    `indexed_blocks` blocks are in the index, unless that has been cleared. `holds` are its shares
    of the store's groups, in their order.
    """

    namespace: Namespace
    tokens: Tokens
    table: BlockTable
    cached_tokens: int
    written_tokens: int
    writable_tokens: int
    indexed_blocks: int
    holds: tuple[Hold, ...] = ()


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why nothing was handed out: the blocks that were needed and those that could be had."""

    needed_blocks: int
    available_blocks: int
