"""One forward of the model: the index arrays that a group's layers share."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from engine.mlx_backend.storage.arena import Arena
from kvstore.pool import blocks_for
from kvstore.types import BlockId

BlockTable = npt.NDArray[np.uint32]
"""Block ids of several rows, `[rows, blocks]`, padded with the arena's blank block."""


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Consecutive tokens of one sequence to compute, positions [start, start + n_tokens).

    `blocks[i]` holds the positions of the sequence's block `first_block + i`; they cover every
    position up to the last token's. `groups`: the tables of the store's other groups.

    `adapter`: the one that computes them, "" for none.
    `index`: which of the step's spans it is, or is a part of. `first_token`: where its token ids
    begin among the step's. `n_read`: of how many of its last tokens the logits are read.
    """

    start: int
    n_tokens: int
    blocks: npt.NDArray[np.uint32]
    first_block: int = 0
    groups: tuple[npt.NDArray[np.uint32], ...] = ()
    index: int = 0
    first_token: int = 0
    n_read: int = 0
    adapter: str = ""

    @property
    def stop(self) -> int:
        return self.start + self.n_tokens

    def split(self, n_tokens: int) -> Iterator[tuple[int, "TokenSpan"]]:
        """Parts of so many tokens, and how far into the span each begins. All logits are read."""
        for ahead in range(0, self.n_tokens, n_tokens):
            n = min(n_tokens, self.n_tokens - ahead)
            yield ahead, self._part(ahead, n, n)

    def unread_part(self) -> "TokenSpan":
        """The tokens before those whose logits are read."""
        return self._part(0, self.n_tokens - self.n_read, 0)

    def read_part(self) -> "TokenSpan":
        """The tokens whose logits are read."""
        return self._part(self.n_tokens - self.n_read, self.n_read, self.n_read)

    def _part(self, ahead: int, n_tokens: int, n_read: int) -> "TokenSpan":
        start, first_token = self.start + ahead, self.first_token + ahead
        return replace(self, start=start, n_tokens=n_tokens, first_token=first_token, n_read=n_read)


class Forward:
    """Spans as the rows of one array, padded on the right to one length, over one group's arena.

    Padded tokens write to the arena's scratch block; no real token's mask admits them.
    `offset` and `offset_after` are `[rows]`: the position of each row's first token, and the
    position after the last token of the padded row. On the host, int32 `[rows]`: `starts_host` and
    `stops_host`, the positions of each row's first token and after its last, and `first_positions`,
    that of its first key. `n_keys` is how many keys a row has.

    Raises ValueError when a span's blocks do not cover its positions.
    """

    offset: mx.array | int
    offset_after: mx.array | int

    def __init__(self, spans: Sequence[TokenSpan], arena: Arena) -> None:
        self.spans = spans
        self.rows = len(spans)
        self.is_lone = self.rows == 1
        self.length = max(span.n_tokens for span in spans)
        self.table = pad_tables(
            [_needed_blocks(span, arena.block_size) for span in spans], arena.blank
        )
        size = arena.block_size
        bounds = [(span.start, span.stop, span.first_block * size) for span in spans]
        self.starts_host, self.stops_host, self.first_positions = np.array(bounds, np.int32).T
        self.starts = mx.array(self.starts_host)
        self.offset, self.offset_after = self.starts, self.starts + self.length
        self.n_keys = self.table.shape[1] * size
        if self.is_lone:
            self.n_keys = spans[0].stop - spans[0].first_block * size
        self._arena = arena
        self._blocks, self._slots = self._written()
        self._begun = [slot for span in spans for slot in self._begun_slots(span)]
        self._slot_mappings: dict[int, mx.array] = {}
        self._cleared: dict[int, mx.array] = {}
        self._heads: dict[int, mx.array] = {}
        self._masks: dict[int | None, mx.array] = {}

    def slot_mapping(self, kv_heads: int) -> mx.array:
        """The slots for K and V in a layer of `kv_heads`; see `Arena.slot_mapping`."""
        if kv_heads not in self._slot_mappings:
            self._slot_mappings[kv_heads] = self._arena.slot_mapping(
                self._blocks, self._slots, kv_heads
            )
        return self._slot_mappings[kv_heads]

    def cleared(self, kv_heads: int) -> mx.array | None:
        """A slot mapping of what to zero in a layer of `kv_heads`: behind each row's last token.

        None when this forward begins no block that it does not fill: behind the last token of any
        other there is nothing but zeros since it was begun, or copied, and what rejected drafts
        have left. These are numbers: else the tokens computed with them would be none.
        """
        if not self._begun:
            return None
        if kv_heads not in self._cleared:
            blocks, slots = (
                mx.array(column, mx.uint32) for column in zip(*self._begun, strict=True)
            )
            self._cleared[kv_heads] = self._arena.slot_mapping(blocks, slots, kv_heads)
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

    def _begun_slots(self, span: TokenSpan) -> list[tuple[BlockId, int]]:
        """Block and slot of what lies behind a span, if it begins the block that it ends in."""
        size = self._arena.block_size
        filled = span.stop % size
        if filled == 0 or filled > span.n_tokens:
            return []
        block = BlockId(int(span.blocks[span.stop // size - span.first_block]))
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

    def __init__(self, spans: Sequence[TokenSpan], arena: Arena) -> None:
        super().__init__(spans, arena)
        (span,) = spans
        self.offset, self.offset_after = span.start, span.stop


class GroupedMaskForward(Forward):
    """For models that keep the heads of a KV head apart: masks `[rows, 1, 1, length, keys]`."""

    def _make_mask(self, window: int | None) -> mx.array:
        return super()._make_mask(window)[:, :, None]


def _needed_blocks(span: TokenSpan, block_size: int) -> npt.NDArray[np.uint32]:
    needed = blocks_for(span.stop, block_size) - span.first_block
    if len(span.blocks) < needed or span.first_block * block_size > span.start:
        raise ValueError(
            f"{len(span.blocks)} blocks from the {span.first_block}-th on do not cover the "
            f"positions {span.start} to {span.stop}"
        )
    return span.blocks[:needed]


def table_width(n_blocks: int) -> int:
    """At least `n_blocks`, at most an eighth more, and one of eight widths in each octave.

    What is gathered by a table then has sizes that come back, so that MLX finds its buffers again
    and a GPU its graphs, while rows grow. What attends block by block reads no padding.
    """
    step = 1 << max(0, (n_blocks - 1).bit_length() - 4)
    return -(-n_blocks // step) * step


def pad_tables(tables: Sequence[npt.NDArray[np.uint32]], blank: BlockId) -> BlockTable:
    """Tables of different lengths as one array, of a `table_width`."""
    width = table_width(max(len(table) for table in tables))
    padded = np.full((len(tables), width), blank, dtype=np.uint32)
    for row, table in enumerate(tables):
        padded[row, : len(table)] = table
    return padded
