"""The sizes of each group's storage, and the groups of a store of these sizes."""

from dataclasses import dataclass

from kvstore.pool import blocks_for
from kvstore.recurrent import RecurrentGroup, RoundedGroup
from kvstore.slots import Group
from kvstore.window import WindowGroup

CHECKPOINT_TOKENS = 512
"""The least number of tokens between the saved states of a long prompt.

Where states are rounded the texts depend on it, so with another one disk caches need a new `FORMAT`
(`storage.py` of the backend).
"""


@dataclass(frozen=True, slots=True)
class WindowSize:
    """Slots of the layers that see `window` tokens; a slot holds one block of all of them."""

    window: int
    n_slots: int


@dataclass(frozen=True, slots=True)
class StateCounts:
    """Slots for states of recurrent layers: of running sequences, and saved to resume from.

    `rounded_every`: the number of tokens after which states are rounded; they are saved there only.
    None: states are saved as they are computed.
    """

    running: int
    saved: int
    rounded_every: int | None = None

    @property
    def total(self) -> int:
        return self.running + self.saved


@dataclass(frozen=True, slots=True)
class StorageSizes:
    """The storage of all groups. `n_blocks` counts the blocks of full attention."""

    n_blocks: int
    windows: tuple[WindowSize, ...] = ()
    states: StateCounts | None = None  # None: no layer is recurrent


@dataclass(frozen=True, slots=True)
class StorageBytes:
    """Bytes of one block in the layers of full attention, of one slot of each group, of all arenas'
    blocks, and of all states, which are allocated when they are needed.
    """

    block: int
    slots: tuple[int, ...]
    arenas: int
    states: int = 0


def build_groups(sizes: StorageSizes, block_size: int, step_tokens: int) -> tuple[Group, ...]:
    """The groups of a store: windows in the order of `sizes.windows`, then the states."""
    groups: list[Group] = [
        WindowGroup(index, size.window, size.n_slots, block_size, step_tokens)
        for index, size in enumerate(sizes.windows)
    ]
    if (states := sizes.states) is not None:
        kind, interval = RecurrentGroup, checkpoint_interval(block_size)
        if states.rounded_every is not None:
            kind, interval = RoundedGroup, states.rounded_every
        groups.append(kind(states.running, states.saved, block_size, interval))
    return tuple(groups)


def checkpoint_interval(block_size: int) -> int:
    """The tokens from one saved state of a long prompt to the next: whole blocks."""
    return blocks_for(CHECKPOINT_TOKENS, block_size) * block_size
