"""What a change of the tree costs does not depend on how deep in the tree it is. Lines are counted,
not time.
"""

from array import array
from collections.abc import Callable

import pytest

from kvstore.node import Match
from kvstore.pool import BlockPool
from kvstore.tree import RadixTree
from kvstore.types import BlockId
from tests.line_counts import lines_of
from tests.unit.kv_helpers import NS

BLOCK = 4
SHALLOW, DEEP = 10, 5_000


class Comb:
    """A path with a branch after each block, so that each block is a node."""

    def __init__(self, depth: int) -> None:
        self.pool = BlockPool(3 * depth + 100)
        self.tree = RadixTree(self.pool, BLOCK, hashes_blocks=True)
        self.tree.journal = []
        self._numbers = iter(range(1, 1 << 30))
        self.path = list[BlockId]()
        for _ in range(depth):
            after = self.path[-1] if self.path else None
            self.grow(after)
            self.path.append(self.grow(after))
        assert self.tree.n_nodes == 2 * depth

    def grow(self, after: BlockId | None) -> BlockId:
        """Index a block after another one, which nobody uses."""
        [block] = self.pool.allocate(1)
        tokens = array("Q", [next(self._numbers)] * BLOCK).tobytes()
        self.tree.insert(NS, tokens, [block], after)
        self.tree.offer(self.pool.release([block]))
        return block

    @property
    def whole(self) -> Match:
        return Match(len(self.path) * BLOCK, tuple(self.path))


def insert_at_the_end(comb: Comb) -> None:
    comb.grow(comb.path[-1])


def adopt(comb: Comb) -> None:
    comb.tree.touch(comb.whole)


def evict(comb: Comb) -> None:
    assert comb.tree.evict() is not None


@pytest.mark.parametrize("change", [insert_at_the_end, adopt, evict])
def test_a_change_costs_the_same_at_any_depth(change: Callable[[Comb], None]) -> None:
    costs = list[int]()
    for depth in (SHALLOW, DEEP):
        comb = Comb(depth)
        adopt(comb)  # the path is used last, so side branches go first
        costs.append(lines_of(lambda comb=comb: change(comb)))  # type: ignore[misc]
    shallow, deep = costs
    assert deep < 2 * shallow, f"{shallow} lines at depth {SHALLOW}, {deep} at depth {DEEP}"


def test_a_clear_costs_the_same_however_much_it_clears() -> None:
    """Nothing is found after it. The blocks become free a few at a time."""
    costs = list[int]()
    for depth in (SHALLOW, DEEP):
        comb = Comb(depth)
        costs.append(lines_of(comb.tree.clear))
        whole = array("Q", [2] * BLOCK).tobytes()  # the first block of the path
        assert comb.tree.match(NS, whole).n_tokens == 0
        n_left = 2 * depth
        while comb.tree.forget_cleared(16):
            assert n_left - comb.tree.n_nodes <= 16
            n_left = comb.tree.n_nodes
        assert n_left == 0
        assert comb.pool.n_free == comb.pool.n_blocks
    shallow, deep = costs
    assert deep < 2 * shallow, f"{shallow} lines at depth {SHALLOW}, {deep} at depth {DEEP}"


def test_sums_are_right_when_they_have_been_added_up() -> None:
    """In pieces of any size."""
    comb = Comb(50)
    n_pieces = 1
    while not comb.tree.add_up(7):
        n_pieces += 1
    root = comb.tree.roots[NS]
    assert n_pieces == 1 + 100 // 7
    assert (root.subtree_nodes, root.subtree_tokens, root.subtree_blocks) == (100, 400, 100)
    insert_at_the_end(comb)
    evict(comb)
    evict(comb)
    assert comb.tree.add_up()
    assert (root.subtree_nodes, root.subtree_tokens, root.subtree_blocks) == (98, 396, 99)
    assert not [found for found in comb.tree.problems() if found]


def test_a_path_outlives_what_was_used_before_its_end() -> None:
    """Only the end of a deep path is made younger by a use. What is above is as young when its turn
    comes.
    """
    comb = Comb(100)
    side = comb.grow(None)
    adopt(comb)
    evicted = list[BlockId]()
    while side not in evicted:
        block = comb.tree.evict()
        assert block is not None
        evicted.append(block)
    assert not set(comb.path) & set(evicted)
