"""The rows of a forward: which tokens they are, and the index arrays that all layers share."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from engine.mlx_backend.kv.arena import Arena, Heads
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
        """Parts of `n_tokens` tokens, with the offset in the span of each. All logits are read."""
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


class RowGroup:
    """Rows of one length over one arena, padded on the right: the index arrays of their layers.

    Padded tokens write to the arena's scratch block; no real token's mask admits them. `starts`,
    `[rows]`: the position of each row's first token; `offset` is what the model is told of it, and
    `offset_after` of the position after a row's last token, padding included. `table` holds the
    rows' blocks, from the one with their first key on, at position `first_keys`, `[rows]`, or 0.
    A lone row, `is_lone`, has `n_keys` keys and no padding after them. On the host, int32 `[rows]`:
    `starts_host`, `stops_host` after each row's last token, `first_positions` of its first key.
    """

    offset: mx.array | int
    offset_after: mx.array | int

    def __init__(self, spans: Sequence[TokenSpan], arena: Arena) -> None:
        """Raises ValueError when a span's blocks do not cover its positions."""
        size = arena.block_size
        self.host_table = pad_tables([_needed_blocks(span, size) for span in spans], arena.blank)
        bounds = [(span.start, span.stop, span.first_block * size) for span in spans]
        self.starts_host, self.stops_host, self.first_positions = np.array(bounds, np.int32).T
        self.spans = spans
        self.is_lone = len(spans) == 1
        length = max(span.n_tokens for span in spans)
        first_keys = mx.array(self.first_positions) if self.first_positions.any() else None
        n_keys = self.host_table.shape[1] * size
        if self.is_lone:
            n_keys = spans[0].stop - spans[0].first_block * size
        self._share(arena, mx.array(self.starts_host), first_keys, len(spans), length, n_keys)
        self.table = mx.array(self.host_table)
        self._blocks, self._slots = self._written()
        self._begun = [slot for span in spans for slot in self._begun_slots(span)]

    def _share(
        self,
        arena: Arena,
        starts: mx.array,
        first_keys: mx.array | None,
        rows: int,
        length: int,
        n_keys: int,
    ) -> None:
        """Set what all kinds of groups have."""
        self.arena = arena
        self.starts = self.offset = starts
        self.offset_after = starts + length
        self.first_keys = first_keys
        self.rows, self.length, self.n_keys = rows, length, n_keys
        self._slot_mappings = dict[Heads, mx.array]()
        self._cleared = dict[Heads, mx.array]()
        self._gather_ids = dict[Heads, tuple[mx.array, mx.array]]()
        self._masks = dict[int | None, mx.array]()

    def slot_mapping(self, heads: Heads) -> mx.array:
        """The slots for K and V in a layer of these heads; see `Arena.slot_mapping`."""
        if heads not in self._slot_mappings:
            mapping = self.arena.slot_mapping(self._blocks, self._slots, heads)
            self._slot_mappings[heads] = mapping
        return self._slot_mappings[heads]

    def cleared(self, heads: Heads) -> mx.array | None:
        """A slot mapping of what to zero in a layer: what lies after each row's last token.

        None when this forward begins no block that it does not fill. After the last token of any
        other block there are zeros since it was begun or copied, and what rejected drafts have
        left. These are numbers: else the tokens computed with them would be none.
        """
        if not self._begun:
            return None
        if heads not in self._cleared:
            blocks, slots = (
                mx.array(column, mx.uint32) for column in zip(*self._begun, strict=True)
            )
            self._cleared[heads] = self.arena.slot_mapping(blocks, slots, heads)
        return self._cleared[heads]

    def gather_ids(self, heads: Heads) -> tuple[mx.array, mx.array]:
        """What a layer of these heads gathers; see `Arena.gather_ids`."""
        if heads not in self._gather_ids:
            self._gather_ids[heads] = self.arena.gather_ids(self.table, heads)
        return self._gather_ids[heads]

    def mask(self, window: int | None = None) -> mx.array:
        """Which keys each token sees, boolean `[rows, 1, length, keys]`.

        Keys are those of the whole table, or for a lone row of exactly its positions. With a window
        a token sees itself and the `window - 1` tokens before it.
        """
        if window not in self._masks:
            queries = self._last_seen()[:, None, :, None]
            keys = mx.arange(self.n_keys)
            if self.first_keys is not None:
                keys = keys + self.first_keys[:, None, None, None]
            mask = keys <= queries
            mask = mask if window is None else mask & (keys > queries - window)
            self._masks[window] = self._shaped(mask)
        return self._masks[window]

    def _shaped(self, mask: mx.array) -> mx.array:
        return mask

    def _last_seen(self) -> mx.array:
        """The last position that each token sees, `[rows, length]`."""
        positions = self.starts[:, None] + mx.arange(self.length)
        # What is padded sees what its row's last token does: a softmax over nothing is no number.
        return mx.minimum(positions, mx.array(self.stops_host - 1)[:, None])

    def _begun_slots(self, span: TokenSpan) -> list[tuple[BlockId, int]]:
        """Block and slot of what lies after a span, if it begins the block that it ends in."""
        size = self.arena.block_size
        filled = span.stop % size
        if filled == 0 or filled > span.n_tokens:
            return []
        block = BlockId(int(span.blocks[span.stop // size - span.first_block]))
        return [(block, slot) for slot in range(filled, size)]

    def _written(self) -> tuple[mx.array, mx.array]:
        """Block and slot of every token, `[rows * length]`, row by row."""
        positions = self.starts_host[:, None] + np.arange(self.length, dtype=np.int32)
        held = positions - self.first_positions[:, None]
        entries, slots = np.divmod(held, self.arena.block_size)
        padding = positions >= self.stops_host[:, None]
        entries[padding] = 0
        blocks = self.host_table[np.arange(self.rows)[:, None], entries]
        blocks[padding] = self.arena.scratch
        return mx.array(blocks.ravel()), mx.array(slots.ravel())


class LoneRow(RowGroup):
    """One row, whose position the model wants as a Python number."""

    def __init__(self, spans: Sequence[TokenSpan], arena: Arena) -> None:
        super().__init__(spans, arena)
        (span,) = spans
        self.offset, self.offset_after = span.start, span.stop


class GroupedMasks(RowGroup):
    """For models that keep the heads of a KV head apart: masks `[rows, 1, 1, length, keys]`."""

    def _shaped(self, mask: mx.array) -> mx.array:
        return mask[:, :, None]


class DecodeRows(RowGroup):
    """One token of each row, whose positions and block table are arrays on the device: what a
    decode step is traced with. No block is begun: they are cleared before the step.
    """

    def __init__(
        self, arena: Arena, table: mx.array, positions: mx.array, first_keys: mx.array | None
    ) -> None:
        rows, width = table.shape
        self.is_lone = False  # a lone row's table has padding, too
        self._share(arena, positions, first_keys, rows, 1, width * arena.block_size)
        self.table = table
        held = positions if first_keys is None else positions - first_keys
        entries = (held // arena.block_size)[:, None]
        self._blocks = mx.take_along_axis(table, entries, axis=1)[:, 0]
        self._slots = (held % arena.block_size).astype(mx.uint32)
        self._begun = []

    def _last_seen(self) -> mx.array:
        return self.starts[:, None]


class GroupedMaskDecodeRows(GroupedMasks, DecodeRows):
    """As `GroupedMasks`, for a decode step."""


class ArenaForward:
    """What the views of one arena know of a forward: its row groups, one after another.

    Where `stands_in`, each token is a row of the model's arrays if there are several groups, and
    attention is computed for each group by itself: what the model is given as K, V and mask only
    stands for what the groups have. Else there is one group, whose keys and mask the model has.
    """

    offset: mx.array | int
    offset_after: mx.array | int

    def __init__(self, groups: Sequence[RowGroup], stands_in: bool) -> None:
        """Raises ValueError for several groups of which each has keys of its own."""
        if len(groups) > 1 and not stands_in:
            raise ValueError("its caches take no rows of unlike length in one forward")
        self.groups = groups
        self.stands_in = stands_in
        [self.rows, self.length] = groups[0].rows, groups[0].length
        self.offset, self.offset_after = groups[0].offset, groups[0].offset_after
        self.is_lone = groups[0].is_lone
        if len(groups) > 1:
            counts = [group.rows * group.length for group in groups]
            self.rows, self.length, self.is_lone = sum(counts), 1, False
            self.bounds = np.cumsum([0, *counts]).tolist()  # of each group among the tokens
            positions = [
                (group.starts_host[:, None] + np.arange(group.length)).ravel() for group in groups
            ]
            self.offset = mx.array(np.concatenate(positions).astype(np.int32))
            self.offset_after = self.offset + 1
        self._slot_mappings = dict[Heads, mx.array]()
        self._cleared = dict[Heads, mx.array | None]()
        self._masks = dict[int | None, mx.array]()

    def mask(self, window: int | None = None) -> mx.array:
        """Which keys each token sees; or what stands for that, `[rows, 1, length, length]`."""
        if not self.stands_in:
            return self.groups[0].mask(window)
        if window not in self._masks:
            self._masks[window] = mx.ones((self.rows, 1, self.length, self.length), mx.bool_)
        return self._masks[window]

    def window_of(self, mask: mx.array | str | None) -> int | None:
        """The window of a mask that stood in. Raises ValueError for one that is not its own."""
        if mask is None or (isinstance(mask, str) and mask == "causal"):
            return None
        for window, own in self._masks.items():
            if own is mask:
                return window
        raise ValueError("the model makes masks of its own")

    def slot_mapping(self, heads: Heads) -> mx.array:
        """The slots that K and V are written to in a layer of these heads."""
        if len(self.groups) == 1:
            return self.groups[0].slot_mapping(heads)
        if heads not in self._slot_mappings:
            parts = [group.slot_mapping(heads) for group in self.groups]
            self._slot_mappings[heads] = _by_plane(parts, heads)
        return self._slot_mappings[heads]

    def cleared(self, heads: Heads) -> mx.array | None:
        """The slots to zero before that; None where there are none."""
        if heads not in self._cleared:
            parts = [found for group in self.groups if (found := group.cleared(heads)) is not None]
            self._cleared[heads] = mx.concatenate(parts) if parts else None
        return self._cleared[heads]


def _by_plane(parts: Sequence[mx.array], heads: Heads) -> mx.array:
    """Slot mappings of groups as one, in which the slots of K come before those of V."""
    if not heads.share_plane:
        return mx.concatenate(list(parts))
    halves = [part.reshape(2, -1) for part in parts]
    return mx.concatenate(halves, axis=1).reshape(-1, 1)


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


def pad_tables(
    tables: Sequence[npt.NDArray[np.uint32]], blank: BlockId, width: int = 0
) -> BlockTable:
    """Tables of different lengths as one array, of that width or else of a `table_width`."""
    width = width or table_width(max(len(table) for table in tables))
    padded = np.full((len(tables), width), blank, dtype=np.uint32)
    for row, table in enumerate(tables):
        padded[row, : len(table)] = table
    return padded
