"""The rows of a steady decode as arrays on the device, brought up to date step by step."""

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from engine.mlx_backend.batch import BatchRow
from engine.mlx_backend.kv.arena import Arena
from engine.mlx_backend.model.attention import Attention, ListedWork
from engine.mlx_backend.model.rows import BlockTable, pad_tables, table_width
from kvstore.window import first_needed

LEAST_WIDTH = 4
"""Widths of tables are multiples of this many blocks: see `width_bucket`."""


def row_bucket(n_rows: int) -> int:
    """The least power of two, or three times one, that is not below `n_rows`."""
    power = 1 << (n_rows - 1).bit_length()
    return power * 3 // 4 if n_rows <= power * 3 // 4 else power


def width_bucket(n_blocks: int) -> int:
    """The least width that is not below `n_blocks`: multiples of 4, then eight in each octave.

    A row of 32-token blocks has at least 128 steps in each.
    """
    return -(-table_width(n_blocks) // LEAST_WIDTH) * LEAST_WIDTH


class GroupTables(NamedTuple):
    """An arena, and which of a sequence's tables its blocks stand in."""

    arena: Arena
    group: int | None  # None: full attention
    window: int | None

    def first(self, position: int) -> int:
        """The entry that holds the first token which the token at a position sees."""
        if self.window is None:
            return 0
        return first_needed(position, self.window, self.arena.block_size)

    def n_blocks(self, position: int) -> int:
        """How many blocks the token at a position sees."""
        return position // self.arena.block_size + 1 - self.first(position)

    def line(self, row: BatchRow) -> npt.NDArray[np.uint32]:
        """The blocks that the next token of a row sees, its own the last."""
        ids = row.tables.ids(self.group)
        return ids[self.first(row.position) : row.position // self.arena.block_size + 1]


class DecodeBatch:
    """Rows that decode one token each, as arrays on the device.

    Each array has a line for each of `size` rows. Lines beyond the last of `rows` are padding: they
    compute position 0 of the scratch block again and again. `tables`: for each arena
    `[size, width]`, padded with its blank block; `first_keys`: for each arena the position of a
    row's first key, `[size]`. `positions`: of the tokens to compute; `advance`: how far a step
    moves them; `deltas`: what is added for their rotary positions. All int32 `[size]`. `begun`: for
    each arena the blocks that the tokens begin. `work`: for each arena the list of its attention;
    None where it needs none.
    """

    def __init__(
        self,
        rows: Sequence[BatchRow],
        size: int,
        groups: Sequence[GroupTables],
        adapters: mx.array | None,
        attention: Attention,
    ) -> None:
        """`adapters`: `[size]`, as `RowAdapters.using` takes them; None where no row takes any."""
        self.adapters = adapters
        self._attention = attention
        self.rows = list(rows)
        self.size = size
        self._groups = groups
        self._next = [row.position for row in rows]
        self._versions = [row.tables.version for row in rows]
        self.positions = mx.array(self._padded(self._next))
        self.advance = mx.array(self._padded([1] * len(rows)))
        deltas = [row.tables.rotary_delta(row.position) for row in rows]
        self.deltas = mx.array(self._padded(deltas))
        self.tables = list[mx.array]()
        self.first_keys = list[mx.array]()
        # For each arena the entry of each row's table that its line begins with.
        self._firsts = [[group.first(position) for position in self._next] for group in groups]
        self.work = list[ListedWork | None]()
        self._shared = list[list[bytes]]()  # for each arena what rows' tables must begin with
        for group, firsts in zip(groups, self._firsts, strict=True):
            width = width_bucket(max(len(group.line(row)) for row in rows))
            self.tables.append(mx.array(self._table(group, width)))
            self.first_keys.append(self._first_keys(firsts))
            self.work.append(None)
            self._shared.append([])
        for index in range(len(groups)):
            self._list_work(index)
        self.begun = self._begun()

    @property
    def widths(self) -> tuple[int, ...]:
        """The width of each arena's tables, in blocks."""
        return tuple(table.shape[1] for table in self.tables)

    @property
    def work_sizes(self) -> tuple[tuple[int, ...], ...]:
        """The sizes of each arena's list of work."""
        return tuple(() if work is None else work.sizes for work in self.work)

    def work_ahead(self, widths: Sequence[int]) -> list[ListedWork | None]:
        """The lists of work for tables of these widths, when each row is half a block further."""
        return [
            self._listed(group, width, self._block_size // 2)
            for group, width in zip(self._groups, widths, strict=True)
        ]

    def widths_ahead(self) -> tuple[int, ...]:
        """The widths that the tables need when each row is half a block further."""
        ahead = self._block_size // 2
        return tuple(
            max(width, width_bucket(max(group.n_blocks(row + ahead) for row in self._next)))
            for group, width in zip(self._groups, self.widths, strict=True)
        )

    def follows(self, rows: Sequence[BatchRow]) -> bool:
        """Bring the tables up to date. False where the rows are not the same, each one token on
        from where a step has left it, or where one has outgrown the width of its table.
        """
        if list(rows) != self.rows:  # rows are equal where they are the same
            return False
        if [row.position for row in rows] != self._next:
            return False
        self.begun = self._begun()
        changed = [
            index
            for index, row in enumerate(rows)
            if row.tables.version != self._versions[index]
            or not row.position % self._block_size
            or self._has_left_a_block(index)
        ]
        return not changed or self._patch(changed)

    def move(self, positions: mx.array) -> None:
        """Advance each row by one token; `positions`: of the tokens that come next."""
        self.positions = positions
        for index, row in enumerate(self.rows):
            row.position += 1
            self._next[index] = row.position

    @property
    def _block_size(self) -> int:
        return self._groups[0].arena.block_size

    def _has_left_a_block(self, row: int) -> bool:
        """Whether the window of a row begins after the first block of its line: that block may be
        another sequence's by now.
        """
        return any(
            group.window is not None and group.first(self._next[row]) != firsts[row]
            for group, firsts in zip(self._groups, self._firsts, strict=True)
        )

    def _patch(self, changed: Sequence[int]) -> bool:
        at = mx.array(list(changed), mx.uint32)
        for index, (group, firsts) in enumerate(zip(self._groups, self._firsts, strict=True)):
            lines = [group.line(self.rows[row]) for row in changed]
            width = self.tables[index].shape[1]
            if max(map(len, lines)) > width:
                return False
            # A new array: what has been built may still read the old one.
            patched = mx.array(self.tables[index])
            patched[at] = mx.array(pad_tables(lines, group.arena.blank, width))
            self.tables[index] = patched
            if group.window is not None:
                for row in changed:
                    firsts[row] = group.first(self._next[row])
                self.first_keys[index] = self._first_keys(firsts)
            for row, line in zip(changed, lines, strict=True):
                # A row may have been given the block of another that is equal.
                if not line.tobytes().startswith(self._shared[index][row]):
                    self._list_work(index)
                    break
        for row in changed:
            self._versions[row] = self.rows[row].tables.version
        return True

    def _table(self, group: GroupTables, width: int) -> BlockTable:
        """The tables of all lines."""
        padding = [np.array([group.arena.scratch], np.uint32)] * (self.size - len(self.rows))
        lines = [group.line(row) for row in self.rows]
        return pad_tables([*lines, *padding], group.arena.blank, width)

    def _list_work(self, index: int) -> None:
        """List the work of an arena's attention anew."""
        group, width = self._groups[index], self.widths[index]
        work = self.work[index] = self._listed(group, width)
        shared = [0] * len(self.rows) if work is None else work.shared[: len(self.rows)].tolist()
        self._shared[index] = [
            group.line(row)[:n_blocks].tobytes()
            for row, n_blocks in zip(self.rows, shared, strict=True)
        ]

    def _listed(self, group: GroupTables, width: int, ahead: int = 0) -> ListedWork | None:
        """The list of work for tables of that width, with each row `ahead` tokens further."""
        if not group.arena.is_attended:
            return None
        n_blocks = self._padded([group.n_blocks(position + ahead) for position in self._next])
        table = self._table(group, width)
        return self._attention.list_work(table, np.maximum(n_blocks, 1), group.arena, group.window)

    def _begun(self) -> list[list[int]]:
        begun = [row for row in self.rows if not row.position % self._block_size]
        return [[int(group.line(row)[-1]) for row in begun] for group in self._groups]

    def _first_keys(self, firsts: Sequence[int]) -> mx.array:
        return mx.array(self._padded([first * self._block_size for first in firsts]))

    def _padded(self, numbers: Sequence[int]) -> npt.NDArray[np.int32]:
        return np.array([*numbers, *[0] * (self.size - len(numbers))], np.int32)
