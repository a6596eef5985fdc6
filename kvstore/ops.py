"""StorageOps: what the store wants done to the arrays around a step, as plain values.

What is filled in was read before, perhaps by another process; `storage/packing.py` of the backend
says how the bytes lie. Ops are executed one after another in the order in which they were given: a
block that an earlier op read from may be the target of a later one.
"""

from dataclasses import dataclass
from typing import TypeAlias

from kvstore.types import BlockId, SlotId


@dataclass(frozen=True, slots=True)
class CopyBlock:
    """Copy the first `n_tokens` slots of one block, in every layer, from `source` to `target`."""

    source: BlockId
    target: BlockId
    n_tokens: int


@dataclass(frozen=True, slots=True)
class CopyWindowBlock:
    """The same for a block of the `group`-th group, a window."""

    group: int
    source: SlotId
    target: SlotId
    n_tokens: int


@dataclass(frozen=True, slots=True)
class ResetState:
    """Let a slot hold the state before the first token."""

    slot: SlotId


@dataclass(frozen=True, slots=True)
class CopyState:
    """Save or restore: let slot `target` hold the state that slot `source` holds now."""

    source: SlotId
    target: SlotId


@dataclass(frozen=True, slots=True)
class RollBackState:
    """Let a slot hold what it held before it was last written."""

    slot: SlotId


@dataclass(frozen=True, slots=True)
class FillBlock:
    """Overwrite a whole block, in every layer, with what a `ReadBlock` gave for its block."""

    block: BlockId
    data: bytes


@dataclass(frozen=True, slots=True)
class FillWindow:
    """The same for a block of the `group`-th group, a window."""

    group: int
    slot: SlotId
    data: bytes


@dataclass(frozen=True, slots=True)
class FillState:
    """Let a slot hold the state that was read."""

    slot: SlotId
    data: bytes


@dataclass(frozen=True, slots=True)
class ReadBlock:
    """Bring up as bytes the first `n_tokens` of a block and of each window's block for the same
    tokens, and a state. None, in `windows` or as `state`: nothing of that.
    """

    block: BlockId
    n_tokens: int
    windows: tuple[SlotId | None, ...] = ()  # one for each window, in the order of their groups
    state: SlotId | None = None


Parts: TypeAlias = tuple[bytes | memoryview | None, ...]
"""What a `ReadBlock` gives: its block, each window's block, the state; None where not asked for.

Behind `n_tokens` all is zero.
"""


@dataclass(frozen=True, slots=True)
class TablePatch:
    """Entries [first, first + len(ids)) of a sequence's table are now `ids`.

    `group` is the index of the store's group whose slots they are; None: they are blocks.
    """

    group: int | None
    first: int
    ids: tuple[int, ...]


StorageOp = (
    CopyBlock
    | CopyWindowBlock
    | ResetState
    | CopyState
    | RollBackState
    | FillBlock
    | FillWindow
    | FillState
)


@dataclass(frozen=True, slots=True)
class StepOps:
    """The ops around the step that computes a lease's next tokens."""

    before: tuple[StorageOp, ...] = ()
    after_chunks: tuple[StorageOp, ...] = ()  # behind the prompts' chunks, before the decodes
    after: tuple[StorageOp, ...] = ()


NO_OPS = StepOps()
