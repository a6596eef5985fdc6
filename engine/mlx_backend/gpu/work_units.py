"""Work units of the paged kernel: which queries attend to which blocks in one thread group.

They are made from a work list, which has shared prefixes and each row's own blocks. A device wants
many units of like length, so each item is cut along its blocks; and a unit holds a limited number
of queries, so those of a shared prefix are cut into tiles. Tiles of the same blocks are neighbours:
they start together, and all but the first find the blocks in the device's cache.

A list holds no lengths. What a query sees follows from its position, which is on the device, so a
list stays right while rows grow into the blocks that their last units already cover.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.mlx_backend.gpu.kind import Kind
from engine.mlx_backend.model.rows import BlockTable, Counts, work_list

Ints = npt.NDArray[np.int32]

UNIT_FIELDS = 8
"""int32 of a unit, in this order: ROW and ROWS (its queries are those of rows [row, row + rows) of
the list), ENTRY and ENTRIES (its keys are those of these entries of the rows' tables, which are the
same in all of them), BASE (where the partial result of the run's first query is written),
FIRST_QUERY (of the unit among the queries of those rows), QUERY_SIMDS (the number of SIMD groups
that have different queries; the others share out the keys), and one that is not used. A unit of no
rows is padding.
"""

MIN_ARRAY = 8
"""Metal passes a smaller array in another address space than the kernel's text names."""

MIN_UNIT_KEYS = 64
"""Keys of a unit at least, below which merging partial results costs more than it gains."""

WANTED_GROUPS = 512
"""Thread groups that a step should have, if its rows are long enough: about four for each processor
of a large device. An estimate.
"""

MIN_SAVED_BLOCKS = 8
"""A prefix is attended to once for all its rows where that saves this many block reads. An
estimate.
"""


@dataclass(frozen=True, slots=True)
class WorkUnits:
    """The work of a step, for all layers of kinds with equal `group`, `tile` and `simds`.

    `units`, `[units, UNIT_FIELDS]`. `order`: the row of the step that is each row of the list: the
    list's are sorted by table. The partial results of the step's row `r` are at `parts[i]`, with
    those of its other queries after it, for `first_parts[r] <= i < first_parts[r + 1]`.
    `n_partials`: the number of partial results. All sizes are powers of two, at least MIN_ARRAY,
    which rows do not outgrow within the blocks that `make` was given for them; arrays end with
    zeros.

    `covered`, `[rows]`: the entries of each row's table that its units reach.
    """

    units: Ints
    order: Ints
    first_parts: Ints
    parts: Ints
    n_partials: int
    covered: Counts

    def reaches(self, stops: Counts, block_size: int) -> bool:
        """Whether the list is right for rows whose last keys are before `stops`, `[rows]`, counted
        from the first key of each table.
        """
        return bool((-(-stops // block_size) <= self.covered[: len(stops)]).all())


def make_units(
    kind: Kind,
    table: BlockTable,
    starts: Counts,
    stops: Counts,
    width: int,
    most_blocks: Counts | None = None,
    min_saved_blocks: int = MIN_SAVED_BLOCKS,
    wanted_groups: int = WANTED_GROUPS,
) -> WorkUnits:
    """The work of rows with these tables, `[rows, entries]`, in any order, whose queries are at the
    positions from `starts` to below `stops`, `[rows]`, counted from the first key of each table.

    `width`: the queries of a row, padding included. `most_blocks`, `[rows]`: how many blocks each
    row may grow to before the sizes of the arrays change; None: as many as it has. A prefix that
    saves fewer than `min_saved_blocks` block reads is read by each row alone.
    """
    n_rows, size = len(table), kind.block_size
    # Any order of bytes has rows with a common prefix next to each other; lexsort takes 20 times as
    # long, because it sorts by one entry after another.
    contents = [line.tobytes() for line in table]
    order = np.array(sorted(range(n_rows), key=contents.__getitem__), np.int32)
    items = work_list(table[order], starts[order], stops[order], size, min_saved_blocks)
    most = (-(-stops // size) if most_blocks is None else most_blocks)[order]
    row, rows, first, blocks = (items[name] for name in ("row", "rows", "block", "blocks"))
    is_own = rows == 1
    room = np.where(is_own, np.maximum(most[row] - first, blocks), blocks)

    n_queries = rows * (kind.group * width)
    query_simds = np.minimum(_power(-(-n_queries // kind.tile)), kind.simds)
    tiles = -(-n_queries // (kind.tile * query_simds))
    unit_blocks = _unit_blocks(kind, int((room * tiles).sum()), wanted_groups)

    # Runs: items cut along their blocks.
    item, nth = _repeated(-(-blocks // unit_blocks))
    ahead = nth * unit_blocks
    # A row's last run reaches beyond the row's end, as far as the row may grow in the table.
    limit = np.where(is_own, table.shape[1] - first, blocks)[item]
    entries = np.minimum(unit_blocks, limit - ahead)
    base = np.cumsum(n_queries[item]) - n_queries[item]
    covered = np.zeros(n_rows, np.int32)
    reached = (first[item] + ahead + entries)[is_own[item]]
    np.maximum.at(covered, order[row[item][is_own[item]]], reached)

    # Units: runs cut into tiles of queries.
    run, tile = _repeated(tiles[item])
    of = item[run]
    units = np.zeros((len(run), UNIT_FIELDS), np.int32)
    fields = row[of], rows[of], first[of] + ahead[run], entries[run], base[run]
    for field, column in enumerate((*fields, tile * kind.tile * query_simds[of], query_simds[of])):
        units[:, field] = column

    # Partial results: one of each run for each of its rows.
    run, nth = _repeated(rows[item])
    lines = order[row[item][run] + nth]
    parts = (base[run] + nth * (kind.group * width))[np.argsort(lines, kind="stable")]
    first_parts = np.concatenate([[0], np.cumsum(np.bincount(lines, minlength=n_rows))])

    runs = -(-room // unit_blocks)
    return WorkUnits(
        _padded(units, int((runs * tiles).sum())),
        _padded(order, n_rows),
        _padded(first_parts, n_rows + 1),
        _padded(parts, int((runs * rows).sum())),
        max(next_power(int((runs * n_queries).sum())), MIN_ARRAY),
        covered,
    )


NESTED_PREFIXES = 4
"""How many items of a list a row is in at most, one within the other, for the bound of
`most_partials`: a system prompt, a conversation, a branch of it, and the row's own blocks.
"""


def most_partials(kind: Kind, n_tokens: int, n_blocks: int) -> int:
    """An upper bound of `WorkUnits.n_partials`, of steps of `n_tokens` tokens, padding included,
    whose rows have `n_blocks` blocks each.

    A unit has at least half of the blocks with which there would be WANTED_GROUPS thread groups, or
    the most that a unit may have.
    """
    n_queries = n_tokens * kind.group
    for_groups = 2 * WANTED_GROUPS * min(kind.tile_queries, n_queries) // kind.kv_heads
    for_length = n_queries * -(-n_blocks // kind.most_entries)
    return next_power(max(for_groups, for_length) + NESTED_PREFIXES * n_queries)


def _unit_blocks(kind: Kind, n_reads: int, wanted_groups: int) -> int:
    """The blocks of a unit, a power of two, with which about `wanted_groups` thread groups read
    `n_reads` blocks.
    """
    blocks = max(n_reads * kind.kv_heads // wanted_groups, MIN_UNIT_KEYS // kind.block_size, 1)
    return min(1 << (blocks.bit_length() - 1), kind.most_entries)


def _repeated(counts: Counts) -> tuple[Ints, Ints]:
    """Each index, `counts` of it times, and how many of the same index come before."""
    index = np.repeat(np.arange(len(counts)), counts)
    nth = np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)
    return index.astype(np.int32), nth.astype(np.int32)


def next_power(n: int) -> int:
    """The power of two that is at least `n`."""
    return 1 << max(n - 1, 0).bit_length()


def _power(n: npt.ArrayLike) -> Ints:
    """The power of two that is at least each of `n`."""
    return (2 ** np.ceil(np.log2(np.maximum(n, 1)))).astype(np.int32)


def _padded(array: npt.NDArray[np.integer], n: int) -> Ints:
    """With zeros at the end, up to the power of two that is at least `n`, and MIN_ARRAY."""
    size = max(next_power(max(n, len(array))), MIN_ARRAY)
    padded = np.zeros((size, *array.shape[1:]), np.int32)
    padded[: len(array)] = array
    return padded
