"""The list of what decodes read: which rows attend together, and that every key is seen once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.mlx_backend.model.rows import (
    BlockTable,
    SharedPrefix,
    WorkList,
    shared_prefixes,
    work_list,
)

BLOCK_SIZE = 4
BLANK = 99


def padded(*rows: list[int]) -> BlockTable:
    table = np.full((len(rows), max(map(len, rows))), BLANK, np.uint32)
    for row, blocks in enumerate(rows):
        table[row, : len(blocks)] = blocks
    return table


def work(*rows: list[int], min_saved: int = 1) -> WorkList:
    """Of rows that see all but one slot of their blocks."""
    stops = np.array([len(row) * BLOCK_SIZE - 1 for row in rows], np.int32)
    return work_list(padded(*rows), stops - 1, stops, BLOCK_SIZE, min_saved)


def shared(*rows: list[int], min_saved: int = 1) -> list[tuple[int, ...]]:
    """Row, rows, block, blocks of what is shared."""
    items = work(*rows, min_saved=min_saved)
    return [tuple(item)[:4] for item in items[: len(items) - len(rows)]]


def test_nothing_shared() -> None:
    assert work([1, 2], [3]).tolist() == [(0, 1, 0, 2, 7), (1, 1, 0, 1, 3)]
    assert work([1, 2, 3]).tolist() == [(0, 1, 0, 3, 11)]


def test_rows_with_one_prefix() -> None:
    assert work([1, 2, 3], [1, 2, 4, 5], [1, 2, 6]).tolist() == [
        (0, 3, 0, 2, 8),
        (0, 1, 2, 1, 3),
        (1, 1, 2, 2, 7),
        (2, 1, 2, 1, 3),
    ]


def test_a_row_s_last_block_is_its_own() -> None:
    """It is being written, even where the tables do not differ."""
    assert shared([1, 2], [1, 2], [1, 2]) == [(0, 3, 0, 1)]


def test_groups_with_different_prefixes() -> None:
    assert shared([1, 2], [1, 3], [4], [5, 6, 7], [5, 6, 8]) == [(3, 2, 0, 2), (0, 2, 0, 1)]


def test_a_longer_prefix_goes_on_from_a_shorter() -> None:
    rows = [9, 1, 2, 3], [9, 1, 2, 4], [9, 5, 6, 7], [9, 5, 6, 8]
    assert shared(*rows) == [(0, 4, 0, 1), (2, 2, 1, 2), (0, 2, 1, 2)]
    assert shared(*rows, min_saved=4) == []


def test_a_prefix_that_saves_too_little_is_read_with_the_longer_ones() -> None:
    pair, other = [9, 1, 2, 3, 4, 5], [9, 6, 7, 8, 10, 11]
    rows = [*pair, 20], [*pair, 21], [*other, 22], [*other, 23]
    assert shared(*rows, min_saved=4) == [(2, 2, 0, 6), (0, 2, 0, 6)]
    assert shared(*rows, min_saved=3) == [(0, 4, 0, 1), (2, 2, 1, 5), (0, 2, 1, 5)]
    assert shared(*rows, min_saved=7) == []


def test_small_savings_are_not_worth_it() -> None:
    rows = [1, 2, 3], [1, 2, 4], [1, 2, 5]
    assert shared(*rows, min_saved=4) == [(0, 3, 0, 2)]
    assert shared(*rows, min_saved=5) == []


@pytest.mark.parametrize("n_rows", [1, 2, 300])
def test_rows_that_share_all_are_one_run(n_rows: int) -> None:
    prefixes = shared_prefixes(np.full(n_rows - 1, 7, np.int32), min_saved_blocks=1)
    assert prefixes == ([SharedPrefix(0, n_rows, 0, 7)] if n_rows > 1 else [])


tables = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=12)


@given(tables, st.integers(1, 8), st.data())
def test_each_row_sees_each_of_its_keys_once(
    paths: list[list[int]], min_saved: int, data: st.DataObject
) -> None:
    """Tables as of sequences that branch: equal paths have equal blocks."""
    paths.sort()
    ids: dict[tuple[int, ...], int] = {}
    rows = [
        [ids.setdefault(tuple(path[: n + 1]), len(ids)) for n in range(len(path))] for path in paths
    ]
    stops = np.array(
        [(len(row) - 1) * BLOCK_SIZE + data.draw(st.integers(1, BLOCK_SIZE)) for row in rows],
        np.int32,
    )
    starts = np.array([data.draw(st.integers(0, stop - 1)) for stop in stops.tolist()], np.int32)
    table = padded(*rows)
    items = work_list(table, starts, stops, BLOCK_SIZE, min_saved)
    seen: list[list[tuple[int, int]]] = [[] for _ in rows]
    for item in items.tolist():
        row, n_rows, block, blocks, keys = item
        assert blocks > 0
        assert keys > (blocks - 1) * BLOCK_SIZE, "no block is read for nothing"
        assert keys <= blocks * BLOCK_SIZE
        assert n_rows == 1 or (n_rows - 1) * blocks >= min_saved
        for member in range(row, row + n_rows):
            assert (table[member] == table[row])[block : block + blocks].all()
            assert n_rows == 1 or (block + blocks) * BLOCK_SIZE <= starts[member], "queries' own"
            seen[member] += [
                (int(table[row, block + key // BLOCK_SIZE]), key % BLOCK_SIZE)
                for key in range(keys)
            ]
    for row, stop, keys_seen in zip(rows, stops.tolist(), seen, strict=True):
        expected = [(row[key // BLOCK_SIZE], key % BLOCK_SIZE) for key in range(stop)]
        assert sorted(keys_seen) == sorted(expected)
