"""Recounts the store from scratch and says what does not add up. For tests and for idle moments."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from kvstore.blocks.table import blocks_for
from kvstore.index.radix_node import Node
from kvstore.store import KVStore
from kvstore.tokens import TOKEN_BYTES
from kvstore.types import BlockId, Namespace


class InvariantError(AssertionError):
    """The store contradicts itself; the message lists all that was found."""


Walked = Sequence[tuple[Namespace, bytes, Node]]
"""Every node, once; see `RadixTree.walk`."""


def check(store: KVStore) -> None:
    """Raise InvariantError unless every count equals what is there to be counted."""
    walked = tuple(store.index.walk())
    problems = [
        *_references(store, walked),
        *_free_list(store),
        *_edges(store, walked),
        *_siblings(store, walked),
        *_leases(store, walked),
        *_groups(store),
        *store.in_flight.problems(store.leases),
        *store.index.problems(),
    ]
    if problems:
        raise InvariantError("; ".join(problems))


def check_idle(store: KVStore) -> None:
    """Raise InvariantError unless, besides, there are no leases and no references."""
    check(store)
    if store.leases or store.pool.n_referenced:
        raise InvariantError(
            f"idle, but {len(store.leases)} leases hold {store.pool.n_referenced} blocks"
        )


def _references(store: KVStore, walked: Walked) -> Iterator[str]:
    pool = store.pool
    ref_counts = Counter(block for lease in store.leases for block in lease.table)
    cached = Counter(block for _, _, node in walked for block in node.blocks)
    for block in map(BlockId, range(pool.n_blocks)):
        count, tables = pool.ref_count(block), ref_counts[block]
        if count != tables:
            yield f"block {block}: {count} references, {tables} tables list it"
        if pool.is_cached(block) != cached[block]:
            yield f"block {block}: cached is {pool.is_cached(block)}, indexed {cached[block]} times"
    shared = sum(count > 1 for count in ref_counts.values())
    counted, recounted = (pool.n_referenced, pool.n_shared), (len(ref_counts), shared)
    if counted != recounted:
        yield "{}/{} referenced/shared, recounted {}/{}".format(*counted, *recounted)
    saved = sum(count - 1 for count in ref_counts.values())
    if pool.n_saved != saved:
        yield f"{pool.n_saved} blocks saved, recounted {saved}"
    evictable = len(cached.keys() - ref_counts.keys())
    referenced = len(ref_counts)
    if pool.n_evictable != evictable or pool.n_free + evictable + referenced != pool.n_blocks:
        parts = f"free {pool.n_free} + evictable {evictable} + referenced {referenced}"
        yield f"{parts} != {pool.n_blocks}"


def _free_list(store: KVStore) -> Iterator[str]:
    free = store.pool.free_blocks()
    if len(set(free)) != len(free):
        yield "a block stands in the free list twice"
    unfree = [block for block in free if store.pool.total_refs(block)]
    if unfree:
        yield f"blocks {unfree} are free and referred to"


def _edges(store: KVStore, walked: Walked) -> Iterator[str]:
    n_nodes, block_bytes = 0, store.block_size * TOKEN_BYTES
    for _, path, node in walked:
        n_nodes += 1
        if blocks_for(len(node.packed), block_bytes) != len(node.blocks) or not node.blocks:
            yield f"edge {node.serial}: {len(node.packed)} bytes in {len(node.blocks)} blocks"
        if len(path) % block_bytes and node.children:
            yield f"edge {node.serial}: a tail with something behind it"
    if n_nodes != store.index.n_nodes:
        yield f"{store.index.n_nodes} nodes, recounted {n_nodes}"


def _siblings(store: KVStore, walked: Walked) -> Iterator[str]:
    block_bytes = store.block_size * TOKEN_BYTES
    nodes = [node for _, _, node in walked]
    parents = {node.parent for node in nodes if node.parent}
    listed = {(parent, child) for parent in parents for child in parent.children}
    for node in nodes:
        if (node.parent, node) not in listed:
            yield f"edge {node.serial}: not among its parent's children"
    for parent in parents:
        firsts = [bytes(child.packed[:block_bytes]) for child in parent.children]
        if firsts != sorted(set(firsts)):
            yield f"edge {parent.serial}: children out of order"
        if any(right.startswith(left) for left, right in pairwise(firsts)):
            yield f"edge {parent.serial}: a tail beside a block that covers it"


def _leases(store: KVStore, walked: Walked) -> Iterator[str]:
    indexed = {}
    for namespace, path, node in walked:
        start = len(path) - len(node.packed)
        for i, block in enumerate(node.blocks):
            indexed[block] = namespace, path[: start + (i + 1) * store.block_size * TOKEN_BYTES]
    for lease in store.leases:
        if lease.written_tokens > len(lease.table) * store.block_size:
            yield f"{lease.written_tokens} tokens written in {len(lease.table)} blocks"
        if not lease.written_tokens <= lease.planned_tokens:
            yield f"{lease.written_tokens} tokens written, {lease.planned_tokens} planned"
        first = lease.written_tokens // store.block_size
        ready_tokens = max(lease.ready_tokens, lease.planned_tokens)
        end = blocks_for(ready_tokens, store.block_size)
        for block in lease.table[first:end] if ready_tokens > lease.written_tokens else ():
            if (references := store.pool.total_refs(block)) != 1:
                yield f"block {block} is to be written, and has {references} references"
        for i, block in enumerate(lease.table):
            written = min((i + 1) * store.block_size, lease.written_tokens)
            if block not in indexed or written <= i * store.block_size:
                continue
            namespace, path = indexed[block]
            own = lease.tokens.packed(0, written)
            common = min(len(path), len(own))
            if namespace != lease.namespace or path[:common] != own[:common]:
                yield f"block {block} is indexed under tokens that are not its sequence's"


def _groups(store: KVStore) -> Iterator[str]:
    pool = store.pool
    known = frozenset(
        block for block in map(BlockId, range(pool.n_blocks)) if pool.total_refs(block)
    )
    for index, group in enumerate(store.groups):
        states = [each.group_states[index] for each in store.leases if each.group_states]
        yield from group.problems(states, known)
