"""What the store asks of a group, whatever its layers keep."""

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

from kvstore.actions import CopyBlock, StorageOp
from kvstore.blocks.table import BlockTable
from kvstore.types import BlockId, Finding, SlotId

NEVER = sys.maxsize
"""More tokens than any sequence has."""


@dataclass(frozen=True, slots=True)
class GroupStats:
    """A group's storage at one moment, in slots: a window's blocks, or states."""

    name: str
    total: int
    free: int
    cached: int  # used by no lease; what eviction can free
    held: int  # used by leases
    saved: int  # by sharing: uses beyond the first of each slot
    evictions: int
    unresumable_tokens: int  # that prompts matched, and had to compute for want of a slot


class GroupState(Protocol):
    """What one lease has of one group: its slots, and what is planned for them.

    `table` is the lease's, brought up to date before each call. The calls come in the order in
    which the lease lives: max_step_tokens, extend, save and, when that step has been computed,
    advance, again and again, and release once. The next step may be planned before an advance.
    """

    def max_step_tokens(self, planned_tokens: int, n_tokens: int, last_prompt_position: int) -> int:
        """How many of the next `n_tokens` one step may compute (at least one).

        Something can be saved where they end, and at `last_prompt_position` if that is among them.
        """
        ...

    def checkpoint(self, n_tokens: int) -> None:
        """Somebody will want to resume where this lease will have written `n_tokens`."""
        ...

    def extend(
        self,
        table: BlockTable,
        planned_tokens: int,
        n_tokens: int,
        copies: Mapping[BlockId, CopyBlock],
    ) -> Sequence[StorageOp]:
        """Make the next positions writable. `copies`: what was just copied, by target."""
        ...

    def ready_tokens(self, planned_tokens: int) -> int:
        """How many may be planned before something is to be saved; blocks are the store's care."""
        ...

    def save(self, planned_tokens: int) -> Sequence[StorageOp]:
        """A step will have written so many tokens: what is to be saved right behind them."""
        ...

    def due_tokens(self) -> int:
        """How many are written when what is to be saved next has been, as far as is planned."""
        ...

    def advance(self, table: BlockTable, written_tokens: int) -> bool:
        """The lease has written so many tokens. Whether something was saved there.

        Called where a block ends and where something is to be saved.
        """
        ...

    def take_changes(self) -> Iterable[tuple[int, tuple[SlotId, ...]]]:
        """Runs of entries that have changed since this was last asked, and their slots."""
        ...

    def donate(
        self, last_block: BlockId, block_tokens: int, ahead_tokens: int
    ) -> Sequence[StorageOp]:
        """All that was written ends in the indexed `last_block`, at its `block_tokens`.

        A step in flight writes `ahead_tokens` more, which nobody needs any more.
        """
        ...

    def release(self) -> None:
        """Let go of everything."""
        ...


class Group(Protocol):
    """Layers that keep one kind of cache, and its storage."""

    name: str

    def resume_point(self, blocks: Sequence[BlockId], n_tokens: int) -> int:
        """The last position up to `n_tokens` at which a lease of these blocks could go on."""
        ...

    def count_unresumable(self, n_tokens: int) -> None:
        """A prompt matched so many tokens behind what it can resume from."""
        ...

    def has_room(self) -> bool:
        """Whether one more lease will always find the slots that it needs."""
        ...

    def admit(
        self, blocks: Sequence[BlockId], n_tokens: int, end_tokens: int
    ) -> tuple[GroupState, Sequence[StorageOp]]:
        """Go on behind the first `n_tokens` tokens (a resume point) of `end_tokens`."""
        ...

    def copy(self, source: BlockId, target: BlockId, n_tokens: int) -> None:
        """`target` begins with the same tokens as `source`, of which a lease has written these."""
        ...

    def repoint(self, old: BlockId, new: BlockId) -> None:
        """A table lists `new` in place of `old`: the same tokens, in a block that is indexed."""
        ...

    def needed(self, n_tokens: int) -> range:
        """Of a table with so many tokens, the entries whose slots it takes to go on behind them."""
        ...

    def attached(self, block: BlockId, n_tokens: int) -> SlotId | None:
        """The slot that is attached to a block for its first `n_tokens` tokens."""
        ...

    def stops(self, block: BlockId) -> Collection[int] | None:
        """After how many of the block's tokens one can go on; None: after each."""
        ...

    def fill(self, block: BlockId, n_tokens: int, data: bytes) -> StorageOp | None:
        """Attach a slot to the block, to be filled with `data`, which was read from one like it.

        None: there is no slot. No lease uses the slot, so it can be evicted.
        """
        ...

    def forget(self, block: BlockId) -> None:
        """The block is free."""
        ...

    def revoke(self, ops: Sequence[StorageOp]) -> None:
        """These ops were not, or perhaps not, executed: cache nothing that rests on them."""
        ...

    def when_attached(self, tell: Callable[[BlockId], None]) -> None:
        """Call `tell` with each block, when one more slot is attached to it."""
        ...

    def stats(self) -> GroupStats: ...

    def problems(self, states: Sequence[GroupState], known: Set[BlockId]) -> Iterator[Finding]:
        """What does not add up, given the states of all leases and the blocks that are not free."""
        ...
