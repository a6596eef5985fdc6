"""Block tables, and the arithmetic of blocks and tokens."""

import pytest

from kvstore.pool import BlockTable, blocks_for
from kvstore.types import BlockId


@pytest.mark.parametrize(
    ("n_tokens", "n_blocks"), [(0, 0), (1, 1), (31, 1), (32, 1), (33, 2), (64, 2)]
)
def test_a_started_block_counts(n_tokens: int, n_blocks: int) -> None:
    assert blocks_for(n_tokens, 32) == n_blocks


def test_a_table_reads_like_a_list() -> None:
    table = BlockTable(4, map(BlockId, (7, 3)))
    table.extend(map(BlockId, (9, 1)))
    assert list(table) == [7, 3, 9, 1]
    assert (len(table), table[2], table[-1], table[1:3]) == (4, 9, 1, [3, 9])
    assert 9 in table
    assert table.block_size == 4


def test_repointing_replaces_one_entry_and_names_the_old_block() -> None:
    table = BlockTable(4, map(BlockId, (7, 3, 9)))
    assert table.repoint(1, BlockId(5)) == 3
    assert list(table) == [7, 5, 9]


def test_a_slice_is_a_copy() -> None:
    table = BlockTable(4, map(BlockId, (7, 3)))
    table[:].clear()
    assert len(table) == 2


def test_changes_are_handed_out_once_as_one_run() -> None:
    table = BlockTable(4, map(BlockId, (7, 3, 9)))
    assert table.take_changes() == (0, (7, 3, 9))
    assert table.take_changes() == (0, ())
    table.extend(map(BlockId, (1,)))
    table.repoint(1, BlockId(5))
    assert table.take_changes() == (1, (5, 9, 1))
    table.extend(())
    assert table.take_changes() == (0, ())
