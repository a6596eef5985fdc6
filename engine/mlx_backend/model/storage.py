"""The arrays behind every group of the store: an arena for each kind of block, and the states."""

from collections.abc import Iterable

import mlx.core as mx

from engine.mlx_backend.model.layout import Layout
from engine.storage_sizes import StorageSizes
from kvstore.actions import CopyBlock, CopyState, CopyWindowBlock, Order, ResetState, RollBackState
from kvstore.arena import Arena
from kvstore.state_arena import StateArena
from kvstore.types import BlockId


class Storage:
    """`full` holds logical blocks; `windows` and `states` are in the order of the store's groups.

    Layers of a kind that the model has none of take no memory.
    """

    def __init__(self, layout: Layout, sizes: StorageSizes, block_size: int) -> None:
        self.full = Arena(layout.full_layers, sizes.n_blocks, block_size)
        self.windows = tuple(
            Arena(layout.layers_of(size.window), size.n_slots, block_size) for size in sizes.windows
        )
        n_states = sizes.states.running + sizes.states.saved if sizes.states else 0
        self.states = StateArena(layout.states, n_states)

    def carry_out(self, orders: Iterable[Order]) -> None:
        """Each group's orders, one after another; groups do not depend on each other.

        Raises ArenaError or IndexError for a block or a state that there is not.
        """
        blocks: list[CopyBlock] = []
        windows: list[list[CopyBlock]] = [[] for _ in self.windows]
        for order in orders:
            match order:
                case CopyBlock():
                    blocks.append(order)
                case CopyWindowBlock(group, source, target, n_tokens):
                    windows[group].append(CopyBlock(BlockId(source), BlockId(target), n_tokens))
                case ResetState() | CopyState() | RollBackState():
                    self.states.carry_out(order)
        self.full.copy(blocks)
        for arena, copies in zip(self.windows, windows, strict=True):
            arena.copy(copies)

    def arrays(self) -> list[mx.array]:
        """All that a forward may have written, to be evaluated at once and not kept."""
        windows = [array for arena in self.windows for array in arena.arrays()]
        return [*self.full.arrays(), *windows, *self.states.unevaluated()]
