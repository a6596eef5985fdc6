"""The tree notes which whole blocks are indexed, as facts that others replay."""

from collections import Counter
from collections.abc import Iterable

import pytest

from kvstore import invariants
from kvstore.node import BlockEvent, BlocksRemoved, BlocksStored, NamespaceCleared
from kvstore.store import KVStore
from kvstore.tokens import TOKEN_BYTES, Digest, Tokens, child_digests, root_digest
from kvstore.types import Namespace
from tests.unit.kv_helpers import BLOCK, NS, admit, make_store, run_of, serve, tree_of, walk
from tests.unit.random_store import RandomStore

A, B = run_of(1000, 16), run_of(2000, 16)
Indexed = dict[Namespace, set[Digest]]


class Replayer:
    """Knows what is indexed from the facts alone, as a subscriber does. It insists that a block
    comes after its parent and goes before it.
    """

    def __init__(self) -> None:
        self.indexed: Indexed = {}
        self._parents: dict[tuple[Namespace, Digest], Digest | None] = {}

    def replay(self, events: Iterable[BlockEvent]) -> None:
        for event in events:
            known = self.indexed.setdefault(event.namespace, set())
            match event:
                case BlocksStored(namespace, parent, hashes, packed):
                    assert parent is None or parent in known
                    start = root_digest(namespace) if parent is None else parent
                    assert list(hashes) == child_digests(start, packed, BLOCK)
                    assert not known.intersection(hashes)
                    known.update(hashes)
                    chain = (parent, *hashes)
                    for before, each in zip(chain, hashes, strict=False):
                        self._parents[namespace, each] = before
                case BlocksRemoved(namespace, hashes):
                    assert known.issuperset(hashes)
                    known.difference_update(hashes)
                    assert not {self._parents[namespace, each] for each in known} & {*hashes}
                case NamespaceCleared():
                    known.clear()
            if not known:
                del self.indexed[event.namespace]


def in_tree(store: KVStore) -> Indexed:
    """The digests of the whole blocks that are indexed, computed from their tokens."""
    found: Indexed = {}
    for namespace, path, _ in walk(tree_of(store)):
        n_bytes = len(path) - len(path) % (TOKEN_BYTES * BLOCK)
        if n_bytes:
            digests = child_digests(root_digest(namespace), path[:n_bytes], BLOCK)
            found.setdefault(namespace, set()).update(digests)
    return found


def events_of(store: KVStore) -> list[BlockEvent]:
    """The facts from now on."""
    tree = tree_of(store)
    tree.block_events = []
    return tree.block_events


def test_whole_blocks_are_noted_without_the_tail() -> None:
    store = make_store(16)
    events = events_of(store)
    serve(store, A[:10])
    (stored,) = events
    assert isinstance(stored, BlocksStored)
    assert (stored.namespace, stored.parent) == (NS, None)
    assert stored.packed == Tokens(A[:8]).packed(0, 8)
    assert list(stored.hashes) == child_digests(root_digest(NS), stored.packed, BLOCK)


def test_what_continues_a_chain_names_its_parent() -> None:
    store = make_store(16)
    serve(store, A[:8])
    events = events_of(store)
    serve(store, [*A[:4], *B[:4]])
    (stored,) = events
    assert isinstance(stored, BlocksStored)
    assert [stored.parent] == child_digests(root_digest(NS), Tokens(A[:4]).packed(0, 4), BLOCK)


def test_a_cached_prompt_changes_nothing() -> None:
    store = make_store(16)
    serve(store, A[:10])
    events = events_of(store)
    serve(store, A[:10])
    assert events == []


def test_a_clear_is_one_fact_and_what_is_freed_later_is_none() -> None:
    store = make_store(16)
    serve(store, A)
    events = events_of(store)
    store.clear(NS)
    while store.forget_cleared(1) is not None:
        pass
    assert events == [NamespaceCleared(NS)]


def test_the_facts_are_not_changed_by_what_happens_later() -> None:
    store = make_store(16)
    events = events_of(store)
    serve(store, A)
    before = repr(events)
    serve(store, [*A[:4], *B[:4]])
    while tree_of(store).evict() is not None:
        pass
    assert repr(events[:1]) == before


def test_nothing_is_noted_unless_it_is_published() -> None:
    store = make_store(16)
    serve(store, A)
    assert tree_of(store).block_events is None


@pytest.mark.parametrize("seed", range(4))
def test_a_replayer_knows_the_tree_after_each_of_10_000_operations(seed: int) -> None:
    driver, replayer, kinds = RandomStore(seed), Replayer(), Counter[type]()
    events = events_of(driver.store)
    for _ in range(2500):
        driver.operate()
        kinds.update(map(type, events))
        replayer.replay(events)
        events.clear()
        assert replayer.indexed == in_tree(driver.store)
    invariants.check(driver.store)
    assert min(kinds[BlocksStored], kinds[BlocksRemoved]) > 100
    assert kinds[NamespaceCleared] > 5


def test_a_node_states_itself() -> None:
    """What is published anew is what the nodes have."""
    store = make_store(32)
    serve(store, A[:10])
    serve(store, [*A[:4], *B[:6]])
    admit(store, A[:10])
    replayer = Replayer()
    for node in tree_of(store).nodes():
        replayer.replay(node.stored(BLOCK))
    assert replayer.indexed == in_tree(store)
