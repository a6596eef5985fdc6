"""The interface of a group: layers that keep one kind of cache, and what a lease has of them."""

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
    unresumable_tokens: int  # matched by prompts, and computed again for want of a slot


class GroupState(Protocol):
    """What one lease has of one group: its slots, and what is planned for them.

    `table` is the lease's, brought up to date before each call. The calls come in the order in
    which the lease lives: max_step_tokens, extend, save and, when that step has been computed,
    advance, again and again, and release once. The next step may be planned before an advance.
    """

    def max_step_tokens(self, planned_tokens: int, n_tokens: int, last_position: int) -> int:
        """How many of the next `n_tokens` one step may compute (at least one).

        Something can be saved where they end, and at `last_position` if that is among them.
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
        """How many tokens may be planned before something is to be saved."""
        ...

    def save(self, planned_tokens: int) -> Sequence[StorageOp]:
        """A step will have written so many tokens. Returns the ops that save the state there."""
        ...

    def keep_back(self, planned_tokens: int, n_tokens: int) -> Sequence[StorageOp] | None:
        """Be ready to go back to what there is before the next step, in which `planned_tokens` end
        and so many more may turn out to be others. Returns the ops for that, before the step; none
        where nothing is needed to write other tokens; None where that cannot be.
        """
        ...

    def go_back(self) -> None:
        """Go on from what was kept."""
        ...

    def go_on(self) -> None:
        """What was kept is not needed."""
        ...

    def due_tokens(self) -> int:
        """How many tokens are written when the next planned save has been made."""
        ...

    def advance(self, table: BlockTable, written_tokens: int) -> bool:
        """The lease has written so many tokens. Returns whether something was saved there.

        Called where a block ends and where something is to be saved.
        """
        ...

    def take_changes(self) -> Iterable[tuple[int, tuple[SlotId, ...]]]:
        """Runs of entries that have changed since this was last asked, and their slots."""
        ...

    def donate(
        self, last_block: BlockId, block_tokens: int, ahead_tokens: int
    ) -> Sequence[StorageOp]:
        """The lease has ended: what it wrote ends in the indexed `last_block`, at `block_tokens`.

        Steps in flight write `ahead_tokens` more, which are not needed.
        """
        ...

    def release(self) -> None:
        """Release all slots."""
        ...


class Group(Protocol):
    """Layers that keep one kind of cache, and its storage."""

    name: str
    rewinds: bool  # whether a lease can write other tokens where it has written some

    def resume_point(self, blocks: Sequence[BlockId], n_tokens: int) -> int:
        """The last position up to `n_tokens` at which a lease of these blocks could resume."""
        ...

    def count_unresumable(self, n_tokens: int) -> None:
        """A prompt matched so many tokens beyond the point where it can resume."""
        ...

    def has_room(self) -> bool:
        """Whether one more lease will always find the slots that it needs."""
        ...

    def admit(
        self, blocks: Sequence[BlockId], n_tokens: int, end_tokens: int
    ) -> tuple[GroupState, Sequence[StorageOp]]:
        """The state of a lease that resumes at `n_tokens` of `end_tokens`, and its ops."""
        ...

    def copy(self, source: BlockId, target: BlockId, n_tokens: int) -> None:
        """`target` begins with the same tokens as `source`, of which a lease has written these."""
        ...

    def repoint(self, old: BlockId, new: BlockId) -> None:
        """A table lists `new` in place of `old`: the same tokens, in a block that is indexed."""
        ...

    def needed(self, n_tokens: int) -> range:
        """The entries of a table of so many tokens whose slots it takes to resume behind them."""
        ...

    def attached(self, block: BlockId, n_tokens: int) -> SlotId | None:
        """The slot that is attached to a block for its first `n_tokens` tokens."""
        ...

    def stops(self, block: BlockId) -> Collection[int] | None:
        """After how many of the block's tokens a lease can resume; None: after each."""
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
