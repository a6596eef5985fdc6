"""One forward of the model: the index arrays that a group's layers share."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from engine.mlx_backend.storage.arena import Arena
from kvstore.blocks.table import blocks_for
from kvstore.types import BlockId

Table = npt.NDArray[np.uint32]
"""Block ids of several rows, `[rows, blocks]`, padded with the arena's blank block."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens of one sequence, positions [start, start + n_tokens).

    `blocks[i]` holds the positions of the sequence's block `first_block + i`; they cover every
    position up to the last token's.
    """

    start: int
    n_tokens: int
    blocks: npt.NDArray[np.uint32]
    first_block: int = 0
    groups: tuple[npt.NDArray[np.uint32], ...] = ()  # the tables of the store's groups

    @property
    def stop(self) -> int:
        return self.start + self.n_tokens


class Forward:
    """Pieces side by side, padded on the right to one length, over one group's arena.

    Padded tokens write to the arena's scratch block; no real token's mask admits them.
    `offset` and `offset_after` are `[rows]`: the position of each row's first token, and the
    position after the last token of the padded row. On the host, int32 `[rows]`: `starts_host` and
    `stops_host`, the positions of each row's first token and after its last, and `first_positions`,
    that of its first key. `n_keys` is how many keys a row has.

    Raises ValueError when a piece's blocks do not cover its positions.
    """

    offset: mx.array | int
    offset_after: mx.array | int

    def __init__(self, pieces: Sequence[Piece], arena: Arena) -> None:
        self.pieces = pieces
        self.rows = len(pieces)
        self.length = max(piece.n_tokens for piece in pieces)
        self.table = pad_tables(
            [_needed_blocks(piece, arena.block_size) for piece in pieces], arena.blank
        )
        size = arena.block_size
        bounds = [(piece.start, piece.stop, piece.first_block * size) for piece in pieces]
        self.starts_host, self.stops_host, self.first_positions = np.array(bounds, np.int32).T
        self.starts = mx.array(self.starts_host)
        self.offset, self.offset_after = self.starts, self.starts + self.length
        self.n_keys = self.table.shape[1] * size
        if self.rows == 1:
            self.n_keys = pieces[0].stop - pieces[0].first_block * size
        self._arena = arena
        self._blocks, self._slots = self._written()
        self._begun = [place for piece in pieces for place in self._begun_places(piece)]
        self._places: dict[int, mx.array] = {}
        self._cleared: dict[int, mx.array] = {}
        self._heads: dict[int, mx.array] = {}
        self._masks: dict[int | None, mx.array] = {}

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
            self._heads[kv_heads] = self._arena.head_ids(mx.array(self.table), kv_heads)
        return self._heads[kv_heads]

    def mask(self, window: int | None = None) -> mx.array:
        """Which keys each token sees, boolean `[rows, 1, length, keys]`.

        Keys are those of the whole table, or for one row alone of exactly its positions. With a
        window a token sees itself and the `window - 1` tokens before it.
        """
        if window not in self._masks:
            self._masks[window] = self._make_mask(window)
        return self._masks[window]

    def _begun_places(self, piece: Piece) -> list[tuple[BlockId, int]]:
        """Block and slot of what lies behind a piece, if it begins the block that it ends in."""
        size = self._arena.block_size
        filled = piece.stop % size
        if filled == 0 or filled > piece.n_tokens:
            return []
        block = BlockId(int(piece.blocks[piece.stop // size - piece.first_block]))
        return [(block, slot) for slot in range(filled, size)]

    def _make_mask(self, window: int | None) -> mx.array:
        positions = self.starts[:, None] + mx.arange(self.length)
        lasts = mx.array(self.stops_host - 1)[:, None]
        # What is padded sees what its row's last token does: a softmax over nothing is no number.
        queries = mx.minimum(positions, lasts)[:, None, :, None]
        keys = mx.arange(self.n_keys)
        if self.first_positions.any():
            keys = keys + mx.array(self.first_positions)[:, None, None, None]
        mask = keys <= queries
        return mask if window is None else mask & (keys > queries - window)

    def _written(self) -> tuple[mx.array, mx.array]:
        """Block and slot of every token, `[rows * length]`, row by row."""
        positions = self.starts_host[:, None] + np.arange(self.length, dtype=np.int32)
        held = positions - self.first_positions[:, None]
        entries, slots = np.divmod(held, self._arena.block_size)
        padding = positions >= self.stops_host[:, None]
        entries[padding] = 0
        blocks = self.table[np.arange(self.rows)[:, None], entries]
        blocks[padding] = self._arena.scratch
        return mx.array(blocks.ravel()), mx.array(slots.ravel())


class LoneForward(Forward):
    """One row, whose position the model wants as a Python number."""

    def __init__(self, pieces: Sequence[Piece], arena: Arena) -> None:
        super().__init__(pieces, arena)
        (piece,) = pieces
        self.offset, self.offset_after = piece.start, piece.stop


class GroupedMaskForward(Forward):
    """For models that keep the heads of a KV head apart: masks `[rows, 1, 1, length, keys]`."""

    def _make_mask(self, window: int | None) -> mx.array:
        return super()._make_mask(window)[:, :, None]


def _needed_blocks(piece: Piece, block_size: int) -> npt.NDArray[np.uint32]:
    needed = blocks_for(piece.stop, block_size) - piece.first_block
    if len(piece.blocks) < needed or piece.first_block * block_size > piece.start:
        raise ValueError(
            f"{len(piece.blocks)} blocks from the {piece.first_block}-th on do not cover the "
            f"positions {piece.start} to {piece.stop}"
        )
    return piece.blocks[:needed]


def table_width(n_blocks: int) -> int:
    """At least `n_blocks`, at most an eighth more, and one of eight widths in each octave.

    What is gathered by a table then has sizes that come back, so that MLX finds its buffers again
    and a GPU its graphs, while rows grow. What attends block by block reads no padding.
    """
    step = 1 << max(0, (n_blocks - 1).bit_length() - 4)
    return -(-n_blocks // step) * step


def pad_tables(tables: Sequence[npt.NDArray[np.uint32]], blank: BlockId) -> Table:
    """Tables of different lengths as one array, of a `table_width`."""
    width = table_width(max(len(table) for table in tables))
    padded = np.full((len(tables), width), blank, dtype=np.uint32)
    for row, table in enumerate(tables):
        padded[row, : len(table)] = table
    return padded
