"""Storage operations on the arrays around a step, as plain values.

The store queues an op with the phase of the step in which it is carried out. Ops of one phase are
carried out in the order in which they were queued: an op may overwrite what an earlier one read.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

from kvstore.types import BlockId, SlotId


class When(IntEnum):
    """The phase of a step in which an op is carried out."""

    FIRST = 0  # before the first forward
    AFTER_PREFILLS = 1  # after all prefill forwards, before the decodes
    LAST = 2  # after all writes
    READ = 3  # after all else


@dataclass(frozen=True, slots=True)
class CopyBlock:
    """Copy the first `n_tokens` positions of `source` to `target`, in every layer of a group.

    `group` is the index of a window group, and the ids are its slots. None: full attention, and the
    ids are blocks.
    """

    source: BlockId
    target: BlockId
    n_tokens: int
    group: int | None = None


@dataclass(frozen=True, slots=True)
class FillBlock:
    """Overwrite a whole block, in every layer of a group, with bytes that a `ReadBlock` returned.

    `group` and the id are as in `CopyBlock`.
    """

    block: BlockId
    data: bytes | memoryview
    group: int | None = None


@dataclass(frozen=True, slots=True)
class ResetState:
    """Set a slot to the state before the first token."""

    slot: SlotId


@dataclass(frozen=True, slots=True)
class CopyState:
    """Save or restore a state: copy it from slot `source` to slot `target`."""

    source: SlotId
    target: SlotId


@dataclass(frozen=True, slots=True)
class RoundState:
    """Round a state to the precision in which states are saved. Copies of it are as exact."""

    slot: SlotId


@dataclass(frozen=True, slots=True)
class RollBackState:
    """Undo all that the latest step wrote to a slot. Does nothing if it wrote nothing there."""

    slot: SlotId


@dataclass(frozen=True, slots=True)
class FillState:
    """Overwrite a state with bytes that a `ReadBlock` returned."""

    slot: SlotId
    data: bytes | memoryview


@dataclass(frozen=True, slots=True)
class ReadBlock:
    """Read the first `n_tokens` tokens of a block, of the windows' slots for these tokens, and a
    state, as bytes. None in `windows` or as `state`: that part is not read.
    """

    block: BlockId
    n_tokens: int
    windows: tuple[SlotId | None, ...] = ()  # one for each window, in the order of their groups
    state: SlotId | None = None


StorageOp = CopyBlock | FillBlock | ResetState | CopyState | RoundState | RollBackState | FillState

StepOp: TypeAlias = tuple[When, StorageOp | ReadBlock]
"""An op and the phase of the step in which it is carried out."""


def used_ids(ops: Iterable[StorageOp | ReadBlock]) -> frozenset[int]:
    """The ids of all blocks and slots that ops read or write, those of all groups in one set."""
    ids = set[int | None]()
    for op in ops:
        match op:
            case CopyBlock(source, target) | CopyState(source, target):
                ids |= {source, target}
            case FillBlock(block):
                ids.add(block)
            case ReadBlock(block, _, windows, state):
                ids |= {block, *windows, state}
            case _:
                ids.add(op.slot)
    return frozenset(each for each in ids if each is not None)


Parts: TypeAlias = tuple[bytes | memoryview | None, ...]
"""The result of a `ReadBlock`: its block, each window's block, the state; None where not read.

Positions from `n_tokens` on are zero. `kv/storage.py` of the backend defines the layout.
"""


@dataclass(frozen=True, slots=True)
class TablePatch:
    """Entries [first, first + len(ids)) of a sequence's table are `ids` from now on.

    `group` is the index of the store's group whose slots they are; None: they are blocks.
    """

    group: int | None
    first: int
    ids: tuple[int, ...]
