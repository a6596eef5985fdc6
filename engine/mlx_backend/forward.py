"""One forward of the model: padded tokens and the index arrays that all layers share."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from kvstore.arena import Arena
from kvstore.block_table import blocks_for
from kvstore.types import BlockId

Table = npt.NDArray[np.uint32]
"""Block ids of several rows, `[rows, blocks]`, padded with the arena's blank block."""

EARLY_LAYERS = 3
"""The device starts once so many layers are laid out, while Python lays out the others.

On two cores with 8 layers it gains up to 2% of a decode on an idle machine and more on a busy one,
as when clients and the server share it. A start in every layer costs more than it gains.
"""


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens of one sequence, positions [start, start + len(tokens))."""

    start: int
    tokens: Sequence[int]
    blocks: Sequence[BlockId]  # covers every position up to the last token's

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


class Forward:
    """Pieces side by side, padded on the right to one length.

    Padded tokens write to the arena's scratch block; no real token's mask admits them.
    `tokens` is `[rows, length]`; `offset` and `offset_after` are `[rows]`: the position of each
    row's first token, and the position after the last token of the padded row.

    Raises ValueError when a piece's blocks do not cover its positions.
    """

    def __init__(self, pieces: Sequence[Piece], arena: Arena) -> None:
        self.pieces = pieces
        self.rows = len(pieces)
        self.length = max(len(piece.tokens) for piece in pieces)
        self.context = max(piece.stop for piece in pieces)
        self.table = pad_tables(
            [_needed_blocks(piece, arena.block_size) for piece in pieces], arena.blank
        )
        starts = np.array([piece.start for piece in pieces], dtype=np.int32)
        self.tokens = mx.array(self._padded_tokens())
        self.offset = mx.array(starts)
        self.offset_after = mx.array(starts + self.length)
        self._arena = arena
        self._blocks, self._slots = self._written(starts)
        self._mx_table = mx.array(self.table)
        self._begun = [place for piece in pieces for place in self._begun_places(piece)]
        self._places: dict[int, mx.array] = {}
        self._cleared: dict[int, mx.array] = {}
        self._heads: dict[int, mx.array] = {}
        self._masks: dict[int | None, mx.array] = {}
        self._layers_reached = 0

    def layer_reached(self, keys: mx.array) -> None:
        """Told by each layer in turn, with its new keys: gives the device an early start."""
        self._layers_reached += 1
        if self._layers_reached == EARLY_LAYERS:
            mx.async_eval(keys)

    def places(self, kv_heads: int) -> mx.array:
        """Where this forward's K and V go in a layer of `kv_heads`; see `Arena.places`."""
        if kv_heads not in self._places:
            self._places[kv_heads] = self._arena.places(self._blocks, self._slots, kv_heads)
        return self._places[kv_heads]

    def cleared(self, kv_heads: int) -> mx.array | None:
        """Slots to zero in a layer of `kv_heads`, as places: those behind each row's last token.

        None when this forward begins no block that it does not fill: behind the last token of any
        other there is nothing but zeros since it was begun, or copied.
        """
        if not self._begun:
            return None
        if kv_heads not in self._cleared:
            blocks, slots = (
                mx.array(column, mx.uint32) for column in zip(*self._begun, strict=True)
            )
            self._cleared[kv_heads] = self._arena.places(blocks, slots, kv_heads)
        return self._cleared[kv_heads]

    def heads(self, kv_heads: int) -> mx.array:
        """The padded block table for a layer of `kv_heads`; see `Arena.head_ids`."""
        if kv_heads not in self._heads:
            self._heads[kv_heads] = self._arena.head_ids(self._mx_table, kv_heads)
        return self._heads[kv_heads]

    def mask(self, window: int | None = None) -> mx.array:
        """Which keys each token sees, boolean `[rows, 1, length, keys]`.

        Keys are those of the whole table, or of exactly `context` positions for one row alone.
        With a window a token sees itself and the `window - 1` tokens before it.
        """
        if window not in self._masks:
            self._masks[window] = self._make_mask(window)
        return self._masks[window]

    def _begun_places(self, piece: Piece) -> list[tuple[BlockId, int]]:
        """Block and slot of what lies behind a piece, if it begins the block that it ends in."""
        size = self._arena.block_size
        filled = piece.stop % size
        if filled == 0 or filled > len(piece.tokens):
            return []
        block = piece.blocks[piece.stop // size]
        return [(block, slot) for slot in range(filled, size)]

    def _make_mask(self, window: int | None) -> mx.array:
        n_keys = self.context if self.rows == 1 else self.table.shape[1] * self._arena.block_size
        queries = (self.offset[:, None] + mx.arange(self.length))[:, None, :, None]
        keys = mx.arange(n_keys)
        mask = keys <= queries
        return mask if window is None else mask & (keys > queries - window)

    def _padded_tokens(self) -> npt.NDArray[np.int32]:
        tokens = np.zeros((self.rows, self.length), dtype=np.int32)
        for row, piece in enumerate(self.pieces):
            tokens[row, : len(piece.tokens)] = piece.tokens
        return tokens

    def _written(self, starts: npt.NDArray[np.int32]) -> tuple[mx.array, mx.array]:
        """Block and slot of every token, `[rows * length]`, row by row."""
        size = self._arena.block_size
        steps = np.arange(self.length, dtype=np.int32)
        positions = starts[:, None] + steps
        lengths = np.array([len(piece.tokens) for piece in self.pieces])
        real = steps < lengths[:, None]
        entries = np.minimum(positions // size, self.table.shape[1] - 1)
        blocks = np.where(real, np.take_along_axis(self.table, entries, 1), self._arena.scratch)
        slots = positions % size
        return mx.array(blocks.astype(np.uint32).ravel()), mx.array(slots.astype(np.uint32).ravel())


def _needed_blocks(piece: Piece, block_size: int) -> Sequence[BlockId]:
    needed = blocks_for(piece.stop, block_size)
    if len(piece.blocks) < needed:
        raise ValueError(
            f"a table of {len(piece.blocks)} blocks does not cover {piece.stop} positions"
        )
    return piece.blocks[:needed]


def pad_tables(tables: Sequence[Sequence[BlockId]], blank: BlockId) -> Table:
    """Tables of different lengths as one array."""
    padded = np.full((len(tables), max(len(table) for table in tables)), blank, dtype=np.uint32)
    for row, table in enumerate(tables):
        padded[row, : len(table)] = table
    return padded
