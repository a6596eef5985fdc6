"""The list of work of a forward's attention: runs of blocks, and the rows that attend to each.

Attentions that read the arena's blocks in place are planned from it. Blocks that several rows share
are in it once.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.mlx_backend.model.rows import BlockTable

Counts = npt.NDArray[np.int32]
"""Rows, or numbers of blocks or keys of rows."""

ITEM = np.dtype([(name, np.int32) for name in ("row", "rows", "block", "blocks", "keys")])
"""A work item, five int32: rows [row, row + rows) attend to the first `keys` keys of entries
[block, block + blocks) of their tables, which are the same in all of these rows. `blocks` and
`keys` are positive.
"""

WorkList = npt.NDArray[np.void]
"""`[items]` of `ITEM`: shared prefixes first, each before those that continue it; then the private
blocks of each row, row by row."""


class SharedPrefix(NamedTuple):
    """Rows [first_row, last_row) share their blocks [first_block, last_block)."""

    first_row: int
    last_row: int
    first_block: int
    last_block: int


def work_list(
    table: BlockTable, starts: Counts, stops: Counts, block_size: int, min_saved_blocks: int
) -> WorkList:
    """The work of rows whose queries are at the positions from `starts` to below `stops`, `[rows]`,
    at least one each.

    `table` is sorted by row, so that rows that share a prefix are neighbours. The blocks of a
    row's queries are always private. A prefix is an item where that saves at least
    `min_saved_blocks` block reads.
    """
    prefixes: list[SharedPrefix] = []
    if len(stops) > 1:
        common = common_prefixes(table, starts // block_size)
        prefixes = shared_prefixes(common, min_saved_blocks)
    skipped = np.zeros(len(stops), dtype=np.int32)
    for prefix in prefixes:  # the deepest of a row comes last
        skipped[prefix.first_row : prefix.last_row] = prefix.last_block
    items = np.zeros(len(prefixes) + len(stops), dtype=ITEM)
    if prefixes:
        first_rows, last_rows, first_blocks, last_blocks = np.array(prefixes, dtype=np.int32).T
        shared = items[: len(prefixes)]
        shared["row"], shared["rows"] = first_rows, last_rows - first_rows
        shared["block"], shared["blocks"] = first_blocks, last_blocks - first_blocks
        shared["keys"] = shared["blocks"] * block_size
    own = items[len(prefixes) :]
    own["row"], own["rows"] = np.arange(len(stops)), 1
    own["block"], own["blocks"] = skipped, -(-stops // block_size) - skipped
    own["keys"] = stops - skipped * block_size
    return items


def common_prefixes(table: BlockTable, most: Counts) -> Counts:
    """The number of blocks that each row's table shares with the next row's, `[rows - 1]`.

    `most`, `[rows]`: the number of blocks of a row that may be shared.
    """
    differs = table[1:] != table[:-1]
    common = np.where(differs.any(axis=1), differs.argmax(axis=1), table.shape[1])
    shared: Counts = np.minimum(common, np.minimum(most[1:], most[:-1])).astype(np.int32)
    return shared


def shared_prefixes(common: Counts, min_saved_blocks: int) -> list[SharedPrefix]:
    """The prefixes worth attending to once for all their rows, outer ones before inner ones.

    `common`: `common_prefixes` of sorted tables. Where some rows of a prefix share a longer one,
    the longer one begins where the shorter ends. A prefix that saves too little is left out, and
    those within it begin where the next outer one ends.
    """
    kept: list[SharedPrefix] = []
    covered = [0] * (len(common) + 1)
    for first, last, depth in reversed(_nested(common.tolist())):
        if (last - first - 1) * (depth - covered[first]) >= min_saved_blocks:
            kept.append(SharedPrefix(first, last, covered[first], depth))
            covered[first:last] = [depth] * (last - first)
    return kept


def _nested(common: list[int]) -> list[tuple[int, int, int]]:
    """First and last row of each maximal run of rows with a prefix in common, and its depth.

    An outer run comes after the runs within it. These are the LCP intervals of Abouelhoda, Kurtz
    and Ohlebusch 2004, "Replacing suffix trees with enhanced suffix arrays".
    """
    found: list[tuple[int, int, int]] = []
    open_intervals = [(0, 0)]  # first row and depth, the depths rising
    for row, depth in enumerate([*common, 0]):
        first = row
        while open_intervals[-1][1] > depth:
            first, ended = open_intervals.pop()
            found.append((first, row + 1, ended))
        if depth > open_intervals[-1][1]:
            open_intervals.append((first, depth))
    return found
