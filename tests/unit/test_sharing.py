"""Which rows attend to a prefix together."""

from engine.mlx_backend.attention.shared_prefixes import SharedPrefix, shared_prefixes
from kvstore.types import BlockId


def tables(*rows: list[int]) -> list[list[BlockId]]:
    return [[BlockId(block) for block in row] for row in rows]


def test_nothing_shared() -> None:
    assert shared_prefixes(tables([1, 2], [3, 4]), 1) == []
    assert shared_prefixes(tables([1, 2, 3]), 1) == []
    assert shared_prefixes(tables([], []), 1) == []


def test_rows_with_one_prefix() -> None:
    rows = tables([1, 2, 3], [1, 2, 4, 5], [1, 2])
    assert shared_prefixes(sorted(rows), 1) == [SharedPrefix(0, 3, 2)]


def test_groups_with_different_prefixes() -> None:
    rows = tables([1, 2], [1, 2], [3], [4, 5, 6], [4, 5, 7])
    assert shared_prefixes(rows, 1) == [SharedPrefix(0, 2, 2), SharedPrefix(3, 5, 2)]


def test_small_savings_are_not_worth_it() -> None:
    rows = tables([1, 2, 3], [1, 2, 4])
    assert shared_prefixes(rows, 2) == [SharedPrefix(0, 2, 2)]
    assert shared_prefixes(rows, 3) == []


def test_the_split_that_saves_more_wins() -> None:
    """One block is common to all, five more to each pair: pairs save 12 reads, all together 3."""
    pair, other = [9, 1, 2, 3, 4, 5], [9, 6, 7, 8, 10, 11]
    assert shared_prefixes(tables(pair, pair, other, other), 1) == [
        SharedPrefix(0, 2, 6),
        SharedPrefix(2, 4, 6),
    ]
    long = [1, 2, 3, 4]
    assert shared_prefixes(tables([*long, 5], [*long, 5], [*long, 6], [*long, 7]), 1) == [
        SharedPrefix(0, 4, 4)
    ]
