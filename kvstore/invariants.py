"""Recounts the store from scratch and reports what does not add up.

Tests call `check`. An idle engine takes `recount_idle` piece by piece.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain, pairwise

from kvstore.lease import Lease
from kvstore.node import Node
from kvstore.pool import BlockPool, blocks_for
from kvstore.store import KVStore
from kvstore.tokens import TOKEN_BYTES
from kvstore.tree import RadixTree
from kvstore.types import BlockId, Finding


class InvariantError(AssertionError):
    """The store contradicts itself; the message lists all findings."""


def check(store: KVStore) -> None:
    """Raise InvariantError unless every count of the store equals the recount."""
    _raise_if_any(recount(store))


def check_idle(store: KVStore) -> None:
    """Raise InvariantError unless the counts are right and there are no leases and references."""
    _raise_if_any(recount_idle(store))


def recount_idle(store: KVStore) -> Iterator[Finding]:
    """Recount a store with which nothing is computed: there should be no leases but pins."""
    yield from recount(store)
    pinned = {block for lease in store.leases if lease.is_pin for block in lease.table}
    n_leases = sum(not lease.is_pin for lease in store.leases)
    if n_leases or store.pool.n_referenced != len(pinned):
        yield (
            f"idle, but {n_leases} leases and {len(pinned)} pinned blocks hold "
            f"{store.pool.n_referenced} blocks"
        )


def recount(store: KVStore) -> Iterator[Finding]:
    """Yield each problem, and None after each piece of work that found none.

    A piece is a block, a slot, a node or a lease, or a sum over all of them, which takes
    milliseconds for a hundred thousand. Drop the iterator before the store changes.
    """
    indexed, times_indexed = dict[BlockId, tuple[Node, int]](), Counter[BlockId]()
    for node in () if store.tree is None else store.tree.nodes():
        indexed |= {block: (node, index) for index, block in enumerate(node.blocks)}
        times_indexed.update(node.blocks)
        yield None
    for node in () if store.tree is None else store.tree.cleared_nodes():
        times_indexed.update(node.blocks)
        yield None
    n_tables = Counter[BlockId]()
    for table in chain((lease.table for lease in store.leases), store.ended):
        n_tables.update(table)
        yield None
    yield from _pool_problems(store.pool, n_tables, times_indexed)
    if store.tree is not None:
        yield from _node_problems(store.tree, store.block_size * TOKEN_BYTES)
        yield from store.tree.problems()
    for lease in store.leases:
        yield from _lease_problems(store, lease, indexed)
    used = n_tables.keys() | times_indexed.keys()
    for number, group in enumerate(store.groups):
        states = [each.group_states[number] for each in store.leases if each.group_states]
        yield from group.problems(states, used)
    if store.in_flight is not None:
        yield from store.in_flight.problems(store.leases)


def _raise_if_any(findings: Iterator[Finding]) -> None:
    if problems := [found for found in findings if found is not None]:
        raise InvariantError("; ".join(problems))


def _pool_problems(
    pool: BlockPool, n_tables: Counter[BlockId], times_indexed: Counter[BlockId]
) -> Iterator[Finding]:
    """Compare the pool's counts with how many tables list each block, and how often the tree."""
    for block in map(BlockId, range(pool.n_blocks)):
        if (count := pool.ref_count(block)) != n_tables[block]:
            yield f"block {block}: {count} references, {n_tables[block]} tables list it"
        if (is_cached := pool.is_cached(block)) != times_indexed[block]:
            yield f"block {block}: cached is {is_cached}, indexed {times_indexed[block]} times"
        yield None
    referenced = sum(count > 0 for count in n_tables.values())
    shared = sum(count > 1 for count in n_tables.values())
    if (pool.n_referenced, pool.n_shared) != (referenced, shared):
        counts = f"{pool.n_referenced}/{pool.n_shared}"
        yield f"{counts} referenced/shared, recounted {referenced}/{shared}"
    saved = n_tables.total() - referenced
    if pool.n_saved != saved:
        yield f"{pool.n_saved} blocks saved, recounted {saved}"
    evictable = sum(not n_tables[block] for block in times_indexed)
    if pool.n_evictable != evictable or pool.n_free + evictable + referenced != pool.n_blocks:
        parts = f"free {pool.n_free} + evictable {evictable} + referenced {referenced}"
        yield f"{parts} != {pool.n_blocks}"
    free = pool.free_blocks()
    if len(set(free)) != len(free):
        yield "a block stands in the free list twice"
    if unfree := [block for block in free if pool.total_refs(block)]:
        yield f"blocks {unfree} are free and referred to"


def _node_problems(tree: RadixTree, block_bytes: int) -> Iterator[Finding]:
    """Check the edge of each node, its children, and the sums over its subtree."""
    n_nodes = 0
    for node in chain(tree.roots.values(), tree.nodes()):
        edge, children, is_root = f"edge {node.serial}", node.children, node.parent is None
        n_nodes += not is_root
        n_blocks = blocks_for(len(node.packed), block_bytes)
        if n_blocks != len(node.blocks) or is_root == bool(node.blocks):
            yield f"{edge}: {len(node.packed)} bytes in {len(node.blocks)} blocks"
        if children and len(node.packed) % block_bytes:
            yield f"{edge}: a tail that has children"
        if any(child.parent is not node for child in children):
            yield f"{edge}: a child is not among its parent's children"
        firsts = [bytes(child.packed[:block_bytes]) for child in children]
        if any(left >= right for left, right in pairwise(firsts)):
            yield f"{edge}: children out of order"
        if any(right.startswith(left) for left, right in pairwise(firsts)):
            yield f"{edge}: a tail next to a block that covers it"
        sums = (node.subtree_nodes, node.subtree_tokens, node.subtree_blocks)
        recounted = (
            sum((child.subtree_nodes for child in children), int(not is_root)),
            sum((child.subtree_tokens for child in children), node.n_tokens),
            sum((child.subtree_blocks for child in children), len(node.blocks)),
        )
        if not node.is_outdated and sums != recounted:
            yield f"{edge}: subtree sums {sums}, recounted {recounted}"
        if not node.is_outdated and any(child.is_outdated for child in children):
            yield f"{edge}: outdated sums below up-to-date ones"
        yield None
    n_nodes += sum(1 for _ in tree.cleared_nodes())
    if tree.n_nodes != n_nodes:
        yield f"{tree.n_nodes} nodes, recounted {n_nodes}"


def _lease_problems(
    store: KVStore, lease: Lease, indexed: Mapping[BlockId, tuple[Node, int]]
) -> Iterator[Finding]:
    """Check a lease's counts, that its written blocks have no other reference, and that its indexed
    blocks are indexed under its own tokens.
    """
    block_size, table = store.block_size, lease.table
    written, planned = lease.written_tokens, lease.planned_tokens
    if written > len(table) * block_size:
        yield f"{written} tokens written in {len(table)} blocks"
    if written > planned:
        yield f"{written} tokens written, {planned} planned"
    if (ready := max(lease.ready_tokens, planned)) > written:
        for block in table[written // block_size : blocks_for(ready, block_size)]:
            if (references := store.pool.total_refs(block)) != 1:
                yield f"block {block} is to be written, and has {references} references"
    yield None
    last = dict[Node, int]()  # by node, the index of the last of its blocks that the lease lists
    for block in table[: blocks_for(written, block_size)]:
        if block in indexed:
            node, index = indexed[block]
            last[node] = max(last.get(node, index), index)
    tokens = lease.tokens.packed(0, written)
    for node, index in last.items():
        path = b"".join(bytes(each.packed) for each in reversed(tuple(node.path())))
        end = len(path) - len(node.packed) + (index + 1) * block_size * TOKEN_BYTES
        is_equal = tokens.startswith(path[: min(end, len(tokens))])
        if node.namespace != lease.namespace or not is_equal:
            block = node.blocks[index]
            yield f"block {block} is indexed under tokens that are not its sequence's"
        yield None
