"""Recounts the store from scratch and says what does not add up.

Tests call `check`. An idle engine takes `recount_idle` piece by piece.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from kvstore.lease import Lease
from kvstore.pool import blocks_for
from kvstore.store import KVStore
from kvstore.tokens import TOKEN_BYTES
from kvstore.tree import Node
from kvstore.types import BlockId, Finding, Namespace


class InvariantError(AssertionError):
    """The store contradicts itself; the message lists all that was found."""


def check(store: KVStore) -> None:
    """Raise InvariantError unless every count equals what is there to be counted."""
    problems = [found for found in recount(store) if found is not None]
    if problems:
        raise InvariantError("; ".join(problems))


def check_idle(store: KVStore) -> None:
    """Raise InvariantError unless, besides, there are no leases and no references."""
    problems = [found for found in recount_idle(store) if found is not None]
    if problems:
        raise InvariantError("; ".join(problems))


def recount_idle(store: KVStore) -> Iterator[Finding]:
    """As `recount`, of a store with which nothing is computed: there should be no leases."""
    yield from recount(store)
    if store.leases or store.pool.n_referenced:
        yield f"idle, but {len(store.leases)} leases hold {store.pool.n_referenced} blocks"


def recount(store: KVStore) -> Iterator[Finding]:
    """Yield each problem, and None after each piece of work that found none.

    A piece is a block, a slot, a node or a lease, or a sum over all of them: milliseconds where
    there are a hundred thousand. Drop the iterator before the store changes.
    """
    seen = _Seen()
    yield from _walk(store, seen)
    yield from _references(store, seen)
    yield from _free_list(store)
    yield from _edges(store, seen)
    yield from _siblings(store, seen)
    yield from _leases(store, seen)
    yield from _groups(store, seen)
    yield from store.in_flight.problems(store.leases)
    yield from store.index.problems()


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a node's edge is in the tree: its bytes are [start, end) of those from the root."""

    namespace: Namespace
    start: int
    end: int


@dataclass(slots=True)
class _Seen:
    """What has been counted so far, by walking the tree and reading the tables of all leases."""

    places: dict[Node, _Place] = field(default_factory=dict)
    indexed: dict[BlockId, tuple[Node, int]] = field(default_factory=dict)  # the block's index
    cached: Counter[BlockId] = field(default_factory=Counter)
    ref_counts: Counter[BlockId] = field(default_factory=Counter)
    known: set[BlockId] = field(default_factory=set)  # blocks that are not free


def _walk(store: KVStore, seen: _Seen) -> Iterator[Finding]:
    for namespace, path, node in store.index.walk():
        seen.places[node] = _Place(namespace, len(path) - len(node.packed), len(path))
        seen.cached.update(node.blocks)
        for index, block in enumerate(node.blocks):
            seen.indexed[block] = node, index
        yield None
    for lease in store.leases:
        seen.ref_counts.update(lease.table)
        yield None


def _references(store: KVStore, seen: _Seen) -> Iterator[Finding]:
    pool = store.pool
    for block in map(BlockId, range(pool.n_blocks)):
        count, tables = pool.ref_count(block), seen.ref_counts[block]
        if count != tables:
            yield f"block {block}: {count} references, {tables} tables list it"
        is_cached, times = pool.is_cached(block), seen.cached[block]
        if is_cached != times:
            yield f"block {block}: cached is {is_cached}, indexed {times} times"
        if count or is_cached:
            seen.known.add(block)
        yield None
    yield from _sums(store, seen)


def _sums(store: KVStore, seen: _Seen) -> Iterator[str]:
    pool, referenced = store.pool, len(seen.ref_counts)
    shared = sum(count > 1 for count in seen.ref_counts.values())
    if (pool.n_referenced, pool.n_shared) != (referenced, shared):
        counts = f"{pool.n_referenced}/{pool.n_shared}"
        yield f"{counts} referenced/shared, recounted {referenced}/{shared}"
    saved = sum(count - 1 for count in seen.ref_counts.values())
    if pool.n_saved != saved:
        yield f"{pool.n_saved} blocks saved, recounted {saved}"
    evictable = len(seen.cached.keys() - seen.ref_counts.keys())
    if pool.n_evictable != evictable or pool.n_free + evictable + referenced != pool.n_blocks:
        parts = f"free {pool.n_free} + evictable {evictable} + referenced {referenced}"
        yield f"{parts} != {pool.n_blocks}"


def _free_list(store: KVStore) -> Iterator[Finding]:
    free, unfree = set[BlockId](), list[BlockId]()
    for block in store.pool.free_blocks():
        if block in free:
            yield "a block stands in the free list twice"
        free.add(block)
        if store.pool.total_refs(block):
            unfree.append(block)
        yield None
    if unfree:
        yield f"blocks {unfree} are free and referred to"


def _edges(store: KVStore, seen: _Seen) -> Iterator[Finding]:
    block_bytes = store.block_size * TOKEN_BYTES
    for node, place in seen.places.items():
        if blocks_for(len(node.packed), block_bytes) != len(node.blocks) or not node.blocks:
            yield f"edge {node.serial}: {len(node.packed)} bytes in {len(node.blocks)} blocks"
        if place.end % block_bytes and node.children:
            yield f"edge {node.serial}: a tail with something behind it"
        yield None
    if len(seen.places) != store.index.n_nodes:
        yield f"{store.index.n_nodes} nodes, recounted {len(seen.places)}"


def _siblings(store: KVStore, seen: _Seen) -> Iterator[Finding]:
    block_bytes = store.block_size * TOKEN_BYTES
    children = dict[Node, set[Node]]()
    for node in seen.places:
        parent = node.parent
        if parent is not None and parent not in children:
            children[parent] = set(parent.children)
        if parent is None or node not in children[parent]:
            yield f"edge {node.serial}: not among its parent's children"
        yield None
    for parent in children:
        firsts = [bytes(child.packed[:block_bytes]) for child in parent.children]
        if any(left >= right for left, right in pairwise(firsts)):
            yield f"edge {parent.serial}: children out of order"
        if any(right.startswith(left) for left, right in pairwise(firsts)):
            yield f"edge {parent.serial}: a tail beside a block that covers it"
        yield None


def _leases(store: KVStore, seen: _Seen) -> Iterator[Finding]:
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
        yield None
        yield from _tokens(store, seen, lease)


def _tokens(store: KVStore, seen: _Seen, lease: Lease) -> Iterator[Finding]:
    """Whether those of its blocks that are indexed stand below the tokens that it has written."""
    written = lease.tokens.packed(0, lease.written_tokens)
    block_bytes, equal = store.block_size * TOKEN_BYTES, set[Node]()
    for node, (index, block) in _last_blocks(store, seen, lease).items():
        place = seen.places[node]
        end = min(place.start + (index + 1) * block_bytes, len(written))
        if place.namespace != lease.namespace or not _begins(seen, written, node, end, equal):
            yield f"block {block} is indexed under tokens that are not its sequence's"
        yield None


def _last_blocks(store: KVStore, seen: _Seen, lease: Lease) -> dict[Node, tuple[int, BlockId]]:
    """By node, the last of its blocks in which the lease has written anything."""
    last = dict[Node, tuple[int, BlockId]]()
    for block in lease.table[: blocks_for(lease.written_tokens, store.block_size)]:
        if block in seen.indexed:
            node, index = seen.indexed[block]
            last[node] = max(last.get(node, (index, block)), (index, block))
    return last


def _begins(seen: _Seen, written: bytes, node: Node, end: int, equal: set[Node]) -> bool:
    """Whether `written` is the same as the path to `node` up to `end`.

    Nodes in `equal` have been compared before, and are not again; those that are equal join them.
    """
    above: Node | None = node
    while above in seen.places and above not in equal:
        place = seen.places[above]
        stop = max(min(place.end, end), place.start)
        if written[place.start : stop] != above.packed[: stop - place.start]:
            return False
        if stop == place.end:
            equal.add(above)
        above = above.parent
    return True


def _groups(store: KVStore, seen: _Seen) -> Iterator[Finding]:
    for index, group in enumerate(store.groups):
        states = [each.group_states[index] for each in store.leases if each.group_states]
        yield from group.problems(states, seen.known)
