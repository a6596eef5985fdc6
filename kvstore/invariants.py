"""Recounts the store from scratch and reports what does not add up.

Tests call `check`. An idle engine takes `recount_idle` piece by piece.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from kvstore.lease import Lease
from kvstore.pool import blocks_for
from kvstore.store import KVStore
from kvstore.tokens import TOKEN_BYTES
from kvstore.tree import Node
from kvstore.types import BlockId, Finding, Namespace


class InvariantError(AssertionError):
    """The store contradicts itself; the message lists all findings."""


def check(store: KVStore) -> None:
    """Raise InvariantError unless every count of the store equals the recount."""
    _raise_if_any(recount(store))


def check_idle(store: KVStore) -> None:
    """Raise InvariantError unless the counts are right and there are no leases and references."""
    _raise_if_any(recount_idle(store))


def recount_idle(store: KVStore) -> Iterator[Finding]:
    """Recount a store with which nothing is computed: there should be no leases."""
    yield from recount(store)
    if store.leases or store.pool.n_referenced:
        yield f"idle, but {len(store.leases)} leases hold {store.pool.n_referenced} blocks"


def recount(store: KVStore) -> Iterator[Finding]:
    """Yield each problem, and None after each piece of work that found none.

    A piece is a block, a slot, a node or a lease, or a sum over all of them, which takes
    milliseconds for a hundred thousand. Drop the iterator before the store changes.
    """
    counts = _Recount(store)
    yield from counts.walk()
    yield from counts.references()
    yield from counts.free_list()
    yield from counts.edges()
    yield from counts.siblings()
    yield from counts.leases()
    for index, group in enumerate(store.groups):
        states = [each.group_states[index] for each in store.leases if each.group_states]
        yield from group.problems(states, counts.used)
    if store.in_flight is not None:
        yield from store.in_flight.problems(store.leases)
    if store.tree is not None:
        yield from store.tree.problems()


def _raise_if_any(findings: Iterator[Finding]) -> None:
    if problems := [found for found in findings if found is not None]:
        raise InvariantError("; ".join(problems))


class _Place(NamedTuple):
    """The position of a node's edge: its bytes are [start, end) of those from the root."""

    namespace: Namespace
    start: int
    end: int


class _Recount:
    """The counts so far, from walking the tree and reading the tables of all leases."""

    def __init__(self, store: KVStore) -> None:
        self.store = store
        self.block_bytes = store.block_size * TOKEN_BYTES
        self.places: dict[Node, _Place] = {}
        self.indexed: dict[BlockId, tuple[Node, int]] = {}  # a block's node, its index there
        self.cached = Counter[BlockId]()
        self.ref_counts = Counter[BlockId]()
        self.used: set[BlockId] = set()  # blocks that are not free

    def walk(self) -> Iterator[Finding]:
        for namespace, path, node in () if self.store.tree is None else self.store.tree.walk():
            self.places[node] = _Place(namespace, len(path) - len(node.packed), len(path))
            self.cached.update(node.blocks)
            for index, block in enumerate(node.blocks):
                self.indexed[block] = node, index
            yield None
        for lease in self.store.leases:
            self.ref_counts.update(lease.table)
            yield None

    def references(self) -> Iterator[Finding]:
        pool, ref_counts = self.store.pool, self.ref_counts
        for block in map(BlockId, range(pool.n_blocks)):
            count, tables = pool.ref_count(block), ref_counts[block]
            if count != tables:
                yield f"block {block}: {count} references, {tables} tables list it"
            is_cached, times = pool.is_cached(block), self.cached[block]
            if is_cached != times:
                yield f"block {block}: cached is {is_cached}, indexed {times} times"
            if count or is_cached:
                self.used.add(block)
            yield None
        referenced = len(ref_counts)
        shared = sum(count > 1 for count in ref_counts.values())
        if (pool.n_referenced, pool.n_shared) != (referenced, shared):
            counts = f"{pool.n_referenced}/{pool.n_shared}"
            yield f"{counts} referenced/shared, recounted {referenced}/{shared}"
        saved = ref_counts.total() - referenced
        if pool.n_saved != saved:
            yield f"{pool.n_saved} blocks saved, recounted {saved}"
        evictable = sum(not ref_counts[block] for block in self.cached)
        if pool.n_evictable != evictable or pool.n_free + evictable + referenced != pool.n_blocks:
            parts = f"free {pool.n_free} + evictable {evictable} + referenced {referenced}"
            yield f"{parts} != {pool.n_blocks}"

    def free_list(self) -> Iterator[Finding]:
        free, unfree = set[BlockId](), list[BlockId]()
        for block in self.store.pool.free_blocks():
            if block in free:
                yield "a block stands in the free list twice"
            free.add(block)
            if self.store.pool.total_refs(block):
                unfree.append(block)
            yield None
        if unfree:
            yield f"blocks {unfree} are free and referred to"

    def edges(self) -> Iterator[Finding]:
        for node, place in self.places.items():
            n_blocks = blocks_for(len(node.packed), self.block_bytes)
            if n_blocks != len(node.blocks) or not node.blocks:
                yield f"edge {node.serial}: {len(node.packed)} bytes in {len(node.blocks)} blocks"
            if place.end % self.block_bytes and node.children:
                yield f"edge {node.serial}: a tail with something behind it"
            yield None
        n_nodes = 0 if self.store.tree is None else self.store.tree.n_nodes
        if len(self.places) != n_nodes:
            yield f"{n_nodes} nodes, recounted {len(self.places)}"

    def siblings(self) -> Iterator[Finding]:
        children = dict[Node, set[Node]]()
        for node in self.places:
            parent = node.parent
            if parent is not None and parent not in children:
                children[parent] = set(parent.children)
            if parent is None or node not in children[parent]:
                yield f"edge {node.serial}: not among its parent's children"
            yield None
        for parent in children:
            firsts = [bytes(child.packed[: self.block_bytes]) for child in parent.children]
            if any(left >= right for left, right in pairwise(firsts)):
                yield f"edge {parent.serial}: children out of order"
            if any(right.startswith(left) for left, right in pairwise(firsts)):
                yield f"edge {parent.serial}: a tail beside a block that covers it"
            yield None

    def leases(self) -> Iterator[Finding]:
        block_size, pool = self.store.block_size, self.store.pool
        for lease in self.store.leases:
            written, planned = lease.written_tokens, lease.planned_tokens
            if written > len(lease.table) * block_size:
                yield f"{written} tokens written in {len(lease.table)} blocks"
            if written > planned:
                yield f"{written} tokens written, {planned} planned"
            ready = max(lease.ready_tokens, planned)
            private = slice(written // block_size, blocks_for(ready, block_size))
            for block in lease.table[private] if ready > written else ():
                if (references := pool.total_refs(block)) != 1:
                    yield f"block {block} is to be written, and has {references} references"
            yield None
            yield from self._tokens(lease)

    def _tokens(self, lease: Lease) -> Iterator[Finding]:
        """Check that its indexed blocks are indexed under the tokens that it has written."""
        written, equal = lease.tokens.packed(0, lease.written_tokens), set[Node]()
        last = dict[Node, tuple[int, BlockId]]()  # by node, the last of its blocks that it lists
        for block in lease.table[: blocks_for(lease.written_tokens, self.store.block_size)]:
            if block in self.indexed:
                node, index = self.indexed[block]
                last[node] = max(last.get(node, (index, block)), (index, block))
        for node, (index, block) in last.items():
            place = self.places[node]
            end = min(place.start + (index + 1) * self.block_bytes, len(written))
            if place.namespace != lease.namespace or not self._begins(written, node, end, equal):
                yield f"block {block} is indexed under tokens that are not its sequence's"
            yield None

    def _begins(self, written: bytes, node: Node, end: int, equal: set[Node]) -> bool:
        """Whether `written` equals the path to `node` up to `end`.

        Nodes in `equal` have been compared before and are skipped; equal ones are added.
        """
        above: Node | None = node
        while above in self.places and above not in equal:
            place = self.places[above]
            stop = max(min(place.end, end), place.start)
            if written[place.start : stop] != above.packed[: stop - place.start]:
                return False
            if stop == place.end:
                equal.add(above)
            above = above.parent
        return True
