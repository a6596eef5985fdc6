"""The pool: references and a free list, nothing else."""

import pytest

from kvstore.pool import BlockPool
from kvstore.types import BlockId


def counts(pool: BlockPool) -> tuple[int, int, int, int]:
    return pool.n_free, pool.n_evictable, pool.n_referenced, pool.n_shared


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(0)


def test_fresh_blocks_are_neighbours_and_a_dropped_run_is_handed_out_again() -> None:
    pool = BlockPool(6)
    first = pool.allocate(3)
    assert first == [0, 1, 2]
    pool.allocate(2)
    assert pool.release(first) == []
    assert pool.allocate(3) == first


def test_allocating_more_than_is_free_raises_and_takes_nothing() -> None:
    pool = BlockPool(2)
    with pytest.raises(IndexError, match="3 blocks asked for, 2 free"):
        pool.allocate(3)
    assert counts(pool) == (2, 0, 0, 0)
    assert pool.allocate(2) == [0, 1]


def test_a_block_is_free_only_when_nobody_refers_to_it() -> None:
    pool = BlockPool(1)
    [block] = pool.allocate(1)
    pool.retain([block])
    pool.cache(block)
    assert (pool.ref_count(block), pool.is_cached(block), pool.total_refs(block)) == (
        2,
        True,
        3,
    )
    assert counts(pool) == (0, 0, 1, 1)
    assert pool.release([block]) == []
    assert counts(pool) == (0, 0, 1, 0)
    assert pool.release([block]) == [block], "from now on only the index keeps it"
    assert counts(pool) == (0, 1, 0, 0)
    pool.uncache(block)
    assert counts(pool) == (1, 0, 0, 0)
    assert pool.free_blocks() == (block,)


def test_references_to_a_free_block_are_refused() -> None:
    pool = BlockPool(1)
    free = BlockId(0)
    with pytest.raises(ValueError, match="cannot be retained"):
        pool.retain([free])
    with pytest.raises(ValueError, match="is in no table"):
        pool.release([free])
    with pytest.raises(ValueError, match="free or already cached"):
        pool.cache(free)
    with pytest.raises(ValueError, match="is not cached"):
        pool.uncache(free)
    assert counts(pool) == (1, 0, 0, 0)


def test_a_block_is_cached_once() -> None:
    pool = BlockPool(1)
    [block] = pool.allocate(1)
    pool.cache(block)
    with pytest.raises(ValueError, match="already cached"):
        pool.cache(block)
    pool.uncache(block)
    with pytest.raises(ValueError, match="is not cached"):
        pool.uncache(block)
