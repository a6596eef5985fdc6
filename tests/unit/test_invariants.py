"""Every check must catch its fault: each test breaks one thing behind the store's back."""

from collections.abc import Callable
from itertools import islice

import pytest

from kvstore import invariants
from kvstore.invariants import InvariantError
from kvstore.lease import Lease
from kvstore.node import Node
from kvstore.store import KVStore
from kvstore.tokens import TOKEN_BYTES, Tokens
from kvstore.types import BlockId, Namespace
from tests.unit.kv_helpers import NS, admit, compute, make_store, run_of, serve, tree_of, walk

STEM = run_of(1, 4)


def make_busy_store() -> tuple[KVStore, Lease]:
    """A stem with two branches, a lone run with a tail, and a lease that holds part of it."""
    store = make_store(16)
    serve(store, STEM + run_of(10, 4))
    serve(store, STEM + run_of(20, 4))
    serve(store, run_of(100, 10))
    lease = admit(store, run_of(100, 9))
    compute(store, lease)
    invariants.check(store)
    return store, lease


def node_of(store: KVStore, tokens: list[int]) -> Node:
    """The node whose lower end stands behind these tokens."""
    packed = Tokens(tokens).packed(0, len(tokens))
    return next(node for _, path, node in walk(tree_of(store)) if path == packed)


def stem(store: KVStore) -> Node:
    return node_of(store, STEM)


def branch(store: KVStore) -> Node:
    return node_of(store, STEM + run_of(10, 4))


def root(store: KVStore) -> Node:
    parent = stem(store).parent
    assert parent is not None
    return parent


def retain_unlisted(store: KVStore, lease: Lease) -> None:
    store.pool.retain(lease.table[:1])


def forget_indexed(store: KVStore, lease: Lease) -> None:
    store.pool.uncache(lease.table[0])


def index_twice(store: KVStore, lease: Lease) -> None:
    branch(store).blocks[0] = lease.table[0]


def list_elsewhere(store: KVStore, lease: Lease) -> None:
    lease.table.repoint(0, BlockId(15))


def miscount_referenced(store: KVStore, lease: Lease) -> None:
    store.pool.n_referenced += 1


def miscount_shared(store: KVStore, lease: Lease) -> None:
    store.pool.n_shared += 1


def miscount_saved(store: KVStore, lease: Lease) -> None:
    store.pool.n_references += 1


def lose_a_block(store: KVStore, lease: Lease) -> None:
    store.pool._free.pop()


def free_twice(store: KVStore, lease: Lease) -> None:
    store.pool._free.append(store.pool._free[-1])


def free_a_held_block(store: KVStore, lease: Lease) -> None:
    store.pool._free.append(lease.table[0])


def lose_tokens_of_an_edge(store: KVStore, lease: Lease) -> None:
    del branch(store).packed[:]


def lose_an_edge(store: KVStore, lease: Lease) -> None:
    node = branch(store)
    node.blocks.clear()
    del node.packed[:]


def shorten_the_stem(store: KVStore, lease: Lease) -> None:
    del stem(store).packed[-TOKEN_BYTES:]


def swap_branches(store: KVStore, lease: Lease) -> None:
    stem(store).children.reverse()


def swap_children_of_the_root(store: KVStore, lease: Lease) -> None:
    root(store).children.reverse()


def double_a_branch(store: KVStore, lease: Lease) -> None:
    first, second = stem(store).children
    second.packed[:] = first.packed


def leave_a_covered_tail(store: KVStore, lease: Lease) -> None:
    first, second = stem(store).children
    first.packed[:] = second.packed[: 2 * TOKEN_BYTES]


def estrange_a_branch(store: KVStore, lease: Lease) -> None:
    branch(store).parent = root(store)


def drop_from_the_queue(store: KVStore, lease: Lease) -> None:
    branch(store).is_queued = False


def write_beyond_the_table(store: KVStore, lease: Lease) -> None:
    lease.written_tokens = 13


def change_its_tokens(store: KVStore, lease: Lease) -> None:
    lease.tokens = Tokens([*run_of(100, 7), 99, 99])


def miscount_a_subtree(store: KVStore, lease: Lease) -> None:
    tree_of(store).add_up()
    branch(store).subtree_tokens += 1


def change_a_hash(store: KVStore, lease: Lease) -> None:
    branch(store).hashes[0] = stem(store).hashes[0]


def change_its_first_token(store: KVStore, lease: Lease) -> None:
    lease.tokens = Tokens([99, *run_of(101, 8)])


def change_its_namespace(store: KVStore, lease: Lease) -> None:
    lease.namespace = Namespace(model="other")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (retain_unlisted, "2 references, 1 tables list it"),
        (forget_indexed, "cached is False, indexed 1 times"),
        (index_twice, "cached is True, indexed 2 times"),
        (list_elsewhere, "block 15: 0 references, 1 tables list it"),
        (miscount_referenced, "4/0 referenced/shared, recounted 3/0"),
        (miscount_shared, "3/1 referenced/shared, recounted 3/0"),
        (miscount_saved, "1 blocks saved, recounted 0"),
        (lose_a_block, r"free \d+ \+ evictable \d+ \+ referenced 3 != 16"),
        (free_twice, "in the free list twice"),
        (free_a_held_block, "are free and referred to"),
        (lose_tokens_of_an_edge, "0 bytes in 1 blocks"),
        (lose_an_edge, "0 bytes in 0 blocks"),
        (shorten_the_stem, "a tail that has children"),
        (swap_branches, "children out of order"),
        (swap_children_of_the_root, "children out of order"),
        (double_a_branch, "children out of order"),
        (leave_a_covered_tail, "a tail next to a block that covers it"),
        (estrange_a_branch, "not among its parent's children"),
        (drop_from_the_queue, "could be evicted, but is not in the queue"),
        (write_beyond_the_table, "13 tokens written in 3 blocks"),
        (miscount_a_subtree, r"subtree sums \(1, 5, 1\), recounted \(1, 4, 1\)"),
        (change_a_hash, "hashes of other tokens"),
        (change_its_tokens, "indexed under tokens that are not its sequence's"),
        (change_its_first_token, "indexed under tokens that are not its sequence's"),
        (change_its_namespace, "indexed under tokens that are not its sequence's"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_the_fault_is_found(fault: Callable[[KVStore, Lease], None], message: str) -> None:
    store, lease = make_busy_store()
    fault(store, lease)
    with pytest.raises(InvariantError, match=message):
        invariants.check(store)


def test_a_node_that_was_not_counted_is_found() -> None:
    store, _ = make_busy_store()
    node = branch(store)
    node.children = [Node(99, node.namespace, node, bytearray(Tokens(STEM).packed(0, 4)), 0)]
    node.children[0].blocks = [BlockId(15)]
    with pytest.raises(InvariantError, match="5 nodes, recounted 6"):
        invariants.check(store)


def test_all_that_was_found_is_listed() -> None:
    store, lease = make_busy_store()
    swap_branches(store, lease)
    write_beyond_the_table(store, lease)
    with pytest.raises(InvariantError, match=r"children out of order; 13 tokens written"):
        invariants.check(store)


def test_a_recount_comes_in_pieces_and_can_be_dropped_after_each() -> None:
    store, _ = make_busy_store()
    pieces = list(invariants.recount(store))
    assert not any(pieces)
    assert len(pieces) > store.pool.n_blocks + tree_of(store).n_nodes
    for n_pieces in range(len(pieces)):
        assert not any(islice(invariants.recount(store), n_pieces))
    invariants.check(store)


def test_idle_means_that_nobody_holds_anything() -> None:
    store, lease = make_busy_store()
    with pytest.raises(
        InvariantError, match="idle, but 1 leases and 0 pinned blocks hold 3 blocks"
    ):
        invariants.check_idle(store)
    store.donate(lease)
    invariants.check_idle(store)
    admit(store, (), NS)
    with pytest.raises(
        InvariantError, match="idle, but 1 leases and 0 pinned blocks hold 0 blocks"
    ):
        invariants.check_idle(store)
